"""The study `evenpack study chunking`: runs and their evaluations, compared."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenpack import console
from evenpack.console import Report
from evenpack.data.recipes import atom_of
from evenpack.studies.chunking.compare import Finished, compare, describe_arms
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import held_out_evaluations, read_curve, read_held_out
from evenpack.studies.chunking.presentation import comparison_tables, plot_lengths, require_plots
from evenpack.studies.runs.arms import of_each_run
from evenpack.studies.runs.jobs import StudyRun
from evenpack.studies.runs.runner import EndedRun, RunDevices
from evenpack.studies.runs.study import Findings, RunsByArm, TrainedStudy


class ChunkingStudy(TrainedStudy[ChunkingConfig]):
    """Each run of the last phase is followed by its evaluations on held-out documents."""

    def __init__(self, study_file: Path, overrides: Sequence[str]) -> None:
        """Loads the study. Raises: ConfigError for settings that make runs invalid, or not comparable."""
        super().__init__(ChunkingConfig, study_file, overrides)
        self.arms = describe_arms(self.study.chunking, self.compared)
        self.evaluations = held_out_evaluations(self.study, self.compared)

    def reference_of(self, arm: str) -> str:
        return self.study.chunking.reference_of(arm, self.arms[arm].max_sequence_length)

    def unnamed_differences(self, run: StudyRun, reference: StudyRun) -> dict[str, tuple[Any, Any]]:
        """Adds the order of rows, which recipes without an atom draw again in each epoch and others keep."""
        found = super().unnamed_differences(run, reference)
        orders = ["drawn again" if atom_of(one.config.data.recipe) is None else "kept" for one in (reference, run)]
        if orders[0] != orders[1] and self.arms[run.arm].epochs > 1:
            found["order of rows in later epochs"] = (orders[0], orders[1])
        return found

    def require_plot(self, path: Path) -> None:
        require_plots(path)

    def compare(self, runs: RunsByArm, ended: Sequence[EndedRun]) -> Findings:
        finished = of_each_run(runs, self._finished)
        rows = compare(finished, self.arms, self.study.chunking)
        segments = {
            name: {seed: one.curve.segments(self.arms[name].epochs).tolist() for seed, one in of_seed.items()}
            for name, of_seed in finished.items()
        }
        return Findings(
            value={"arms": rows, "segments": segments},
            shown=comparison_tables(rows, self.study.chunking),
            draw=lambda folder, origin: plot_lengths(finished, rows, self.study, folder, origin=origin),
        )

    def _finished(self, run: StudyRun) -> Finished:
        curve = read_curve(run.output_dir)
        evaluations = [evaluation for evaluation in self.evaluations if evaluation.starts_from == run.key]
        alone = self.study.chunking.documents_alone
        return Finished(curve=curve, held_out=read_held_out(curve, evaluations, documents_alone=alone))

    def describe(self, groups: Sequence[RunDevices]) -> Report:
        """Lists the runs for `--dry-run`, and says how to plan one. Raises: ConfigError."""
        report = super().describe(groups)
        run = self.compared[0]
        command = shlex.join(["evenpack", "plan", str(run.run_file), *run.overrides])
        report.shown.append(
            console.text(
                f"Compared with {self.study.chunking.reference}, at the same length. Steps and hours of a run, "
                f"here of the first one: {command}"
            )
        )
        return report
