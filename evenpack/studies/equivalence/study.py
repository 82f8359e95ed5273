"""The study `evenpack study equivalence`: runs and their fine-tunings, compared with a reference."""

from collections.abc import Sequence
from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.studies.columns import table_of
from evenpack.studies.equivalence.compare import (
    TaskComparison,
    TunedOfArms,
    compare,
    compare_tuned,
    read_curve,
    read_tuned,
)
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.equivalence.presentation import comparison_tables, plot_equivalence, tuned_tables
from evenpack.studies.runs.arms import of_each_run
from evenpack.studies.runs.jobs import FinetuneRun, expand_finetunings
from evenpack.studies.runs.runner import EndedRun, RunDevices
from evenpack.studies.runs.study import FINETUNINGS, Findings, RunsByArm, TrainedStudy, finetune_rows


class EquivalenceStudy(TrainedStudy[EquivalenceConfig]):
    """The last checkpoint of each run of the last phase may be fine-tuned for tasks."""

    def __init__(self, study_file: Path, overrides: Sequence[str]) -> None:
        """Loads the study. Raises: ConfigError for settings that make a run invalid."""
        super().__init__(EquivalenceConfig, study_file, overrides)
        self.finetunings = expand_finetunings(self.study.finetune, self.compared)

    def describe(self, groups: Sequence[RunDevices]) -> Report:
        report, section = super().describe(groups), self.study.equivalence
        rule = console.text(
            f"Compared with {section.reference} by held-out {section.measure}; differences within "
            f"± {section.margin:g} count as none"
        )
        report.shown.append(rule)
        if any(row["sequences"] is None for row in report.value["runs"]):
            report.shown.append(console.text("Values that depend on data that is not prepared yet are shown as -"))
        rows = report.value["finetunings"] = finetune_rows(self.finetunings)
        if rows:
            title = f"Then {len(rows)} fine-tunings, a device each"
            report.shown.append(table_of(rows, FINETUNINGS, title=title))
        return report

    def reference_of(self, arm: str) -> str:
        return self.study.equivalence.reference

    def compare(self, runs: RunsByArm, ended: Sequence[EndedRun]) -> Findings:
        section = self.study.equivalence
        curves = of_each_run(runs, lambda run: read_curve(run.output_dir))
        comparison, tasks = compare(curves, section), self._compare_tasks(ended)

        def draw(path: Path, origin: str) -> list[Path]:
            plot_equivalence(curves, comparison, self.study, path, origin=origin)
            return [path]

        return Findings(
            value={"comparison": comparison, "curves": curves, "finetuned": tasks},
            shown=[*comparison_tables(comparison, section), *tuned_tables(tasks, section)],
            draw=draw,
        )

    def _compare_tasks(self, ended: Sequence[EndedRun]) -> list[TaskComparison]:
        """Compares the arms for each task for which a fine-tuning has finished."""
        finished = [one.run for one in ended if isinstance(one.run, FinetuneRun) and one.state == "finished"]
        comparisons = []
        for task in self.study.finetune:
            tuned: TunedOfArms = {
                arm: {run.seed: read_tuned(run.output_dir) for run in finished if (run.task, run.arm) == (task, arm)}
                for arm in self.study.arms
            }
            comparisons.append(compare_tuned(task, tuned, self.study.equivalence))
        return [comparison for comparison in comparisons if comparison is not None]
