"""A study of trained runs: it loads its file, trains unfinished runs and reports; each study adds its comparison."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import RenderableType

from evenpack import console
from evenpack.console import Report
from evenpack.data.manifest import MANIFEST
from evenpack.differences import as_text, differences, flatten
from evenpack.engine.config import TrainingSection
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.errors import EXIT_STOPPED, ConfigError
from evenpack.progress import Progress
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import require_plot
from evenpack.studies.provenance import provenance_of_runs
from evenpack.studies.runs.jobs import (
    ROWS_SEED,
    Evaluation,
    FinetuneRun,
    Job,
    StudyRun,
    expand,
    interleaved,
    require_tasks,
)
from evenpack.studies.runs.runner import PLACES, EndedRun, Machine, RunDevices, describe_state, recorded, train_runs
from evenpack.studies.runs.study_file import RunsStudyConfig, load_study
from evenpack.units import counted

StudyT = TypeVar("StudyT", bound=RunsStudyConfig)

_ABSENT = object()
_NOT_RECORDED = "not recorded"

RunsByArm = Mapping[str, Mapping[int, StudyRun]]
"""Finished runs of the last phase by arm and seed; an arm without one is there, and empty."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The comparison of the finished runs."""

    value: Mapping[str, Any]
    """Keys of the JSON in addition to the keys of all studies."""
    shown: Sequence[RenderableType]
    draw: Callable[[Path, str], Sequence[Path]]
    """Draws the figures: takes the path of --plot and the line of origin, returns the paths of the figures."""


class TrainedStudy(ABC, Generic[StudyT]):
    """A loaded study file with its jobs."""

    evaluations: Sequence[Evaluation] = ()
    """Evaluations of trainings, each done before the next training is started."""
    finetunings: Sequence[FinetuneRun] = ()
    """Fine-tunings that follow all trainings."""

    def __init__(self, schema: type[StudyT], study_file: Path, overrides: Sequence[str]) -> None:
        """Loads the study. Raises: ConfigError for settings that make a run invalid."""
        self.study, run_overrides = load_study(study_file, schema, overrides)
        self.runs = expand(self.study, run_overrides)
        self.compared = tuple(run for run in self.runs if run.phase == self.study.last_phase)

    @property
    def jobs(self) -> Sequence[Job]:
        """The trainings, and what is done between them."""
        return interleaved(self.runs, self.evaluations)

    @abstractmethod
    def reference_of(self, arm: str) -> str:
        """Returns the name of the arm with which this one is compared; its own where it is compared with none."""

    def unnamed_differences(self, run: StudyRun, reference: StudyRun) -> dict[str, tuple[Any, Any]]:
        """Returns what differs between two arms although the settings of neither name it; the reference's value first.

        Such as keys of a section that an arm replaces as a whole. Keys that only one of two kinds has are no
        difference, nor is the seed of rows, which the study sets.
        """
        named = {key for arm in (run.arm, reference.arm) for key in flatten(self.study.arms[arm])}
        dumps = [one.config.model_dump(mode="json") for one in (reference, run)]
        return {
            key: pair
            for key, pair in differences(dumps[0], dumps[1], absent=_ABSENT).items()
            if key not in named and key not in (*PLACES, ROWS_SEED) and _ABSENT not in pair
        }

    @cached_property
    def unnamed(self) -> dict[str, dict[str, tuple[Any, Any]]]:
        """The `unnamed_differences` of each arm that has any from its reference."""
        first = {run.arm: run for run in reversed(self.compared)}  # arms of a phase have the same seeds
        found = {arm: self.unnamed_differences(first[arm], first[self.reference_of(arm)]) for arm in self.study.arms}
        return {arm: keys for arm, keys in found.items() if keys}

    @abstractmethod
    def compare(self, runs: RunsByArm, ended: Sequence[EndedRun]) -> Findings:
        """Compares the finished runs of the last phase. Raises: DataError for a damaged log."""

    def require_plot(self, path: Path) -> None:
        """Checks the path of --plot. Raises: ConfigError if nothing can be drawn there."""
        require_plot(path)

    def describe(self, groups: Sequence[RunDevices]) -> Report:
        """Lists the runs for `--dry-run`. Raises: ConfigError if the ranks cannot divide a step."""
        rows = run_rows(self.runs, ranks=groups[0].ranks)
        shown = [arms_text(self.study), table_of(rows, _RUNS, title=self.title(groups)), *self.warnings()]
        return Report(value={"study": self.study, "runs": rows, "unnamed_differences": self.unnamed}, shown=shown)

    def warnings(self) -> list[RenderableType]:
        """Returns a line for each arm whose settings do not name all that differs from its reference."""
        return [
            console.text(
                f"Warning: arm {arm} differs from {self.reference_of(arm)} in what neither names: "
                + "; ".join(f"{key} ({as_text(now)}, there {as_text(before)})" for key, (before, now) in keys.items())
            )
            for arm, keys in self.unnamed.items()
        ]

    def title(self, groups: Sequence[RunDevices]) -> str:
        """Returns the title of a list of the runs."""
        name, count = self.study.study.name, len(self.runs)
        return f"{name}: {count} runs, {len(groups)} at a time, {groups[0].ranks} ranks each"

    def run(self, machine: Machine, *, devices_per_run: int | None, only_report: bool, plot: Path | None) -> Report:
        """Runs unfinished jobs, and compares finished runs. Raises: ConfigError, RunError, DataError."""
        if plot is not None:
            self.require_plot(plot)
        ended = recorded([*self.jobs, *self.finetunings]) if only_report else self._train(machine, devices_per_run)
        report = self._report(ended, plot, only_report=only_report)
        failed = sum(one.state == "failed" for one in ended)
        if failed:
            report.unmet = f"{failed} of {len(ended)} runs failed; their errors are above"
        if machine.is_stop_requested:
            report.exit_code = EXIT_STOPPED
        return report

    def _train(self, machine: Machine, devices_per_run: int | None) -> tuple[EndedRun, ...]:
        require_tasks(self.finetunings)
        groups = machine.device_groups(devices_per_run)
        run_rows(self.runs, ranks=groups[0].ranks)  # before hours of others' training
        with machine.held(self.study.study.output_dir), Progress(console.messages()) as progress:
            for warning in self.warnings():
                progress.note(str(warning))
            ended = train_runs(self.jobs, machine, groups, progress)
            if self.finetunings:  # a device each, because a fine-tuning is one process
                ended += train_runs(self.finetunings, machine, machine.device_groups(1), progress, earlier=ended)
        return ended

    def _report(self, ended: Sequence[EndedRun], plot: Path | None, *, only_report: bool) -> Report:
        finished = [one.run for one in ended if isinstance(one.run, StudyRun) and one.state == "finished"]
        compared = [run for run in finished if run.phase == self.study.last_phase]
        records = {run.key: read_run_record(run.output_dir) for run in finished}
        by_arm = {arm: {run.seed: run for run in compared if run.arm == arm} for arm in self.study.arms}
        found = self.compare(by_arm, ended)
        origin = provenance_of_runs(self.study.study.name, [records[run.key] for run in compared])
        report = Report(
            value={
                "study": self.study,
                "origin": origin,
                "measured_on": measured_on(list(records.values())),
                "runs": [{"run": one.run.key, "state": one.state, "message": one.message} for one in ended],
                "unnamed_differences": self.unnamed,
                **found.value,
            },
            shown=[*found.shown, *self.warnings(), *unfinished_text(ended, only_report=only_report)],
        )
        if plot is not None and compared:
            report.shown.append(console.text("\n".join(f"Drew {path}" for path in found.draw(plot, origin))))
        return report


def measured_on(records: Sequence[RunRecord | None]) -> dict[str, Any]:
    """Returns the provenance that a figure must carry, of all starts of all runs (None: a run has no record)."""
    starts = [start for record in records if record is not None for start in record.starts]
    missing = [] if starts and None not in records else [_NOT_RECORDED]
    dates = sorted(start.date for start in starts)
    return {
        "devices": sorted({f"{start.ranks} x {start.device}" for start in starts}) + missing,
        "processor": _NOT_RECORDED,  # but in the names of devices, where they are processors
        "evenpack": ", ".join(dict.fromkeys([*(start.evenpack for start in starts), *missing])),
        "torch": ", ".join(dict.fromkeys([*(start.torch for start in starts), *missing])),
        "commit": ", ".join(dict.fromkeys([*(start.commit or "no checkout" for start in starts), *missing])),
        "date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or _NOT_RECORDED,
    }


def _step(row: Mapping[str, Any]) -> str:
    size = "by tokens" if row["items_per_step"] is None else "{items_per_step:,} {batching}".format(**row)
    return f"{size}, {row['layout']}"


_RUNS = (
    Column("run"),
    Column("state"),
    Column("step", _step),
    Column("accumulation", "micro_batches_per_rank"),
    Column("steps"),
    Column("sequences/step", "sequences_per_step", ",.0f"),
    Column("sequences", form=",.0f"),
    Column("starts from", "starts_from", missing=""),
)
FINETUNINGS = (
    Column("run"),
    Column("state"),
    Column("task", "title"),
    Column("step", _step),
    Column("epochs"),
    Column("seeds", lambda row: ", ".join(map(str, row["seeds"]))),
)


def run_rows(runs: Sequence[StudyRun], *, ranks: int) -> list[dict[str, Any]]:
    """Returns the runs before they are started. Values that depend on their data are None until that is prepared.

    Raises: ConfigError if the ranks cannot divide a step, or a run has finished with other settings.
    """
    return [_run_row(run, ranks) for run in runs]


def _run_row(run: StudyRun, ranks: int) -> dict[str, Any]:
    config = run.config
    resolved = open_run(config, verify="later") if (config.prepared_dir / MANIFEST).is_file() else None
    per_item = 1.0 if config.training.batching == "sequences" else None
    if resolved is not None:
        config, per_item = resolved.config, float(resolved.item.sequences)
    training = config.training
    items, steps = training.stated_items_per_step, training.steps  # items before `packing_adjustment` if not prepared
    per_step = None if per_item is None or items is None else items * per_item
    try:
        accumulation = _accumulation(training, resolved, ranks)
    except ConfigError as error:
        raise ConfigError(
            f"run {run.key} of the study: {error}. Each run of the study has {counted(ranks, 'device')}: "
            "--devices-per-run gives it another number"
        ) from error
    return _job_row(run) | {
        "batching": training.batching,
        "layout": training.layout,
        "items_per_step": items,
        "micro_batches_per_rank": accumulation,
        "steps": steps,
        "sequences_per_step": per_step,
        "sequences": None if per_step is None or steps is None else per_step * steps,
    }


def _job_row(job: Job) -> dict[str, Any]:
    state = describe_state(job)
    return {"run": job.key, "state": state, "starts_from": job.starts_from, "output_dir": str(job.output_dir)}


def finetune_rows(finetunings: Sequence[FinetuneRun]) -> list[dict[str, Any]]:
    """Returns the fine-tunings before they are started. Raises: ConfigError if one has finished with other settings."""
    return [
        _job_row(one)
        | {
            "task": one.task,
            "title": one.config.data.definition.title,
            "layout": one.config.training.layout,
            "items_per_step": one.config.training.sequences_per_step,
            "batching": "sequences",
            "epochs": one.config.training.epochs,
            "seeds": one.config.run.seeds,
        }
        for one in finetunings
    ]


def _accumulation(training: TrainingSection, resolved: ResolvedRun | None, ranks: int) -> int | None:
    """Returns the accumulation; None where it depends on unprepared data.

    Raises: ConfigError if a step cannot be divided.
    """
    if resolved is not None:
        return resolved.settled.micro_batches(ranks)
    is_stated = training.stated_items_per_step is not None and training.packing_adjustment == "none"
    return training.micro_batches(ranks) if is_stated else None


def arms_text(study: RunsStudyConfig) -> RenderableType:
    """Returns the settings in which the arms differ."""
    lines = []
    for name, phase in study.phases.items():
        lines.append(f"{name}: {phase.base}, seeds {', '.join(map(str, phase.seeds))}")
        for arm, settings in phase.arms.items():
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            lines.append(f"  {arm:24} {words or '(as the run file)'}")
    return console.text("\n".join(lines))


def unfinished_text(ended: Sequence[EndedRun], *, only_report: bool = False) -> list[RenderableType]:
    """Lists failed runs with their errors and stopped ones, and counts those that did not begin."""
    failed = [f"  {one.run.key}: {one.message}" for one in ended if one.state == "failed"]
    unfinished = [one for one in ended if one.state == "unfinished"]
    to_do = [f"{one.run.key} ({one.message})" for one in unfinished if one.message]
    waiting = [one.run.key for one in unfinished if not one.message]
    if waiting:
        to_do.append(waiting[0] if len(waiting) == 1 else f"{len(waiting)} that did not begin, {waiting[0]} first")
    shown: list[RenderableType] = []
    if failed:
        shown.append(console.text("\n".join(["Failed:", *failed])))
    if to_do:
        command = "the same command without --only-report" if only_report else "the same command again"
        shown.append(console.text(f"Not finished: {', '.join(to_do)}. Run {command} to continue them."))
    return shown
