"""The study `evenpack study chunking`: runs and their evaluations, compared; their plans before they are started."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.console import Report
from evenpack.data.manifest import MANIFEST
from evenpack.data.recipes import atom_of
from evenpack.studies.chunking.compare import Finished, compare, describe_arms
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import held_out_evaluations, read_curve, read_held_out
from evenpack.studies.chunking.presentation import comparison_tables, plot_lengths, require_plots
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.plan import RunPlan, plan_run
from evenpack.studies.runs.arms import of_each_run
from evenpack.studies.runs.jobs import StudyRun
from evenpack.studies.runs.runner import EndedRun, RunDevices
from evenpack.studies.runs.study import Findings, RunRow, RunsByArm, TrainedStudy, run_rows


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

    def describe(self, groups: Sequence[RunDevices], options: PlanOptions) -> Report:
        """Lists the runs for `--dry-run`, with the plan of each. Raises: ConfigError."""
        options.require_valid()
        planned = planned_runs(self.runs, options, ranks=groups[0].ranks)
        others = [f"{arm} with {name}" for arm, name in self.study.chunking.references.items() if arm != name]
        compared = f"Compared with {self.study.chunking.reference}, at the same length"
        reference = console.text("; ".join([compared, *others]))
        command = prepare_command(planned, self.runs)
        return Report(
            value={
                "study": self.study,
                "runs": planned,
                "prepare_first": command,
                "unnamed_differences": self.unnamed,
            },
            shown=[
                planned_table(planned, title=self.title(groups)),
                reference,
                *self.warnings(),
                *unknown_text(planned, command),
            ],
        )


def _of_plan(compute: Callable[[RunPlan], float | None]) -> Callable[[Any], float | None]:
    """Returns a function of a planned run that is None where its plan is not known."""
    return lambda one: None if one.plan is None else compute(one.plan)


_PLANNED = (
    Column("run"),
    Column("state"),
    Column("recipe"),
    Column("MSL", "max_sequence_length"),
    Column("atom"),
    Column("rows/step", "items_per_step"),
    Column("accumulation", "micro_batches_per_rank"),
    Column("steps"),
    Column("tokens", "plan.cost.tokens", ",.0f"),
    Column("padding", _of_plan(lambda plan: 1.0 - plan.data.packing_efficiency), ".2%"),
    Column("tokens/parameter", _of_plan(lambda plan: round(plan.cost.tokens_per_parameter, 2))),
    Column("FLOPs", "plan.cost.flops", ".3g"),
)
_HOURS = Column("hours", _of_plan(lambda plan: None if plan.cost.hours is None else round(plan.cost.hours.hours, 2)))


@dataclass(frozen=True, kw_only=True)
class PlannedRun(RunRow):
    """A run as far as its run file and the known part of its data determine it; its steps may follow from the plan."""

    recipe: str
    """`data.recipe.kind`."""
    max_sequence_length: int
    atom: int | None
    plan: RunPlan | None
    """None before the data is tokenised, unless it follows from counts."""


def planned_runs(runs: Sequence[StudyRun], options: PlanOptions, *, ranks: int) -> tuple[PlannedRun, ...]:
    """Returns the planned runs; runs of one arm with different seeds have the same plan.

    Raises: ConfigError if the ranks cannot divide the steps of a run, one has finished with other settings, or a plan
    cannot be computed.
    """
    plans: dict[tuple[str, str], RunPlan | None] = {}
    planned = []
    for row, run in zip(run_rows(runs, ranks=ranks), runs, strict=True):
        arm = (run.phase, run.arm)
        if arm not in plans:
            plans[arm] = _plan(run, options, ranks=ranks)
        plan, data = plans[arm], run.config.data
        planned.append(
            PlannedRun(
                **vars(row if plan is None else replace(row, steps=plan.cost.steps)),
                recipe=data.recipe.kind,
                max_sequence_length=data.recipe.max_sequence_length,
                atom=atom_of(data.recipe),
                plan=plan,
            )
        )
    return tuple(planned)


def prepare_command(planned: Sequence[PlannedRun], runs: Sequence[StudyRun]) -> str | None:
    """Returns the command that makes the tokens on which all plans depend; None where no plan is missing."""
    missing = {one.run for one in planned if one.plan is None}
    first = next((run for run in runs if run.key in missing), None)
    return None if first is None else shlex.join(["evenpack", "prepare", str(first.run_file), *first.overrides])


def planned_table(planned: Sequence[PlannedRun], *, title: str) -> RenderableType:
    """Returns one line per run, with its hours where they are computed."""
    has_hours = any(one.plan is not None and one.plan.cost.hours is not None for one in planned)
    return table_of(planned, [*_PLANNED, _HOURS] if has_hours else _PLANNED, title=title)


def unknown_text(planned: Sequence[PlannedRun], command: str | None) -> list[RenderableType]:
    """Returns the reason why figures are missing, if any, and the command that makes them available."""
    if command is None:
        return []
    kinds = sorted({one.recipe for one in planned if one.plan is None})
    return [
        console.text(
            f"A dash stands for what is not known yet: the steps of {', '.join(kinds)} follow from the length of each "
            "document, and the corpus is not tokenised. (Those of concat and documents follow from --corpus-tokens and "
            f"--corpus-documents, too.) This tokenises it for all runs, then list them again:\n{command}"
        )
    ]


def _plan(run: StudyRun, options: PlanOptions, *, ranks: int) -> RunPlan | None:
    """Returns the exact plan over prepared data, or one by counts where they suffice; else None."""
    config = run.config
    if (config.prepared_dir / MANIFEST).is_file():
        return plan_run(config, replace(options, corpus_tokens=None, corpus_documents=None), ranks=ranks)
    if options.corpus_tokens is None or config.data.recipe.kind not in ("concat", "documents"):
        return None
    return plan_run(config, options, ranks=ranks)
