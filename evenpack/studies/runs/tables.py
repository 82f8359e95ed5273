"""The runs of a study as a table: the settings and the progress of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from evenpack import console
from evenpack.data.prepare.manifest import MANIFEST
from evenpack.engine.config import TrainingSection
from evenpack.engine.deepspeed_config import micro_batches_per_step
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.errors import ConfigError
from evenpack.studies.runs.config import RunsStudyConfig
from evenpack.studies.runs.expansion import StudyRun
from evenpack.studies.runs.finetunings import FinetuneRun
from evenpack.studies.runs.results import describe_state
from evenpack.studies.runs.runner import EndedRun


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run before it is started. Values that depend on its data are None until that is prepared."""

    run: str
    state: str
    starts_from: str | None
    batching: str
    layout: str
    items_per_step: int | None
    """Packs or sequences; for a run that is not prepared, before `training.packing_adjustment`, and None where its
    step is in tokens."""
    micro_batches_per_rank: int | None
    steps: int | None
    sequences_per_step: float | None
    sequences: float | None
    """Sequences in total."""
    output_dir: str


def run_rows(runs: Sequence[StudyRun], *, ranks: int) -> tuple[RunRow, ...]:
    """Returns the rows.

    Raises: ConfigError if the ranks cannot divide a step, or a run has finished with other settings.
    """
    return tuple(_row(run, ranks) for run in runs)


def _row(run: StudyRun, ranks: int) -> RunRow:
    config = run.config
    resolved = open_run(config) if (config.prepared_dir / MANIFEST).is_file() else None
    per_item = 1.0 if config.training.batching == "sequences" else None
    if resolved is not None:
        config, per_item = resolved.config, float(resolved.item.sequences)
    training = config.training
    items, steps = training.stated_items_per_step, training.steps
    per_step = None if per_item is None or items is None else items * per_item
    try:
        accumulation = _accumulation(training, resolved, ranks)
    except ConfigError as error:
        raise ConfigError(f"run {run.key} of the study: {error}") from error
    return RunRow(
        run=run.key,
        state=describe_state(run),
        starts_from=run.starts_from,
        batching=training.batching,
        layout=training.layout,
        items_per_step=items,
        micro_batches_per_rank=accumulation,
        steps=steps,
        sequences_per_step=per_step,
        sequences=None if per_step is None or steps is None else per_step * steps,
        output_dir=str(run.output_dir),
    )


def _accumulation(training: TrainingSection, resolved: ResolvedRun | None, ranks: int) -> int | None:
    """Returns the accumulation; None where it depends on unprepared data.

    Raises: ConfigError if a step cannot be divided.
    """
    if resolved is not None:
        return resolved.micro_batches(ranks)
    is_stated = training.stated_items_per_step is not None and training.packing_adjustment == "none"
    return micro_batches_per_step(training, ranks) if is_stated else None


def runs_table(rows: Sequence[RunRow], *, title: str) -> RenderableType:
    """Returns one line per run."""
    shown = [
        {
            "run": row.run,
            "state": row.state,
            "step": f"{_step_size(row)}, {row.layout}",
            "accumulation": row.micro_batches_per_rank,
            "steps": row.steps,
            "sequences/step": None if row.sequences_per_step is None else round(row.sequences_per_step),
            "sequences": None if row.sequences is None else round(row.sequences),
            "starts from": row.starts_from or "",
        }
        for row in rows
    ]
    return console.table(shown, title=title)


def _step_size(row: RunRow) -> str:
    return "by tokens" if row.items_per_step is None else f"{row.items_per_step:,} {row.batching}"


@dataclass(frozen=True, kw_only=True)
class FinetuneRow:
    """A fine-tuning before it is started."""

    run: str
    state: str
    starts_from: str
    task: str
    title: str
    layout: str
    items_per_step: int
    """Packs or sequences."""
    batching: str
    epochs: int
    seeds: tuple[int, ...]
    output_dir: str


def finetune_rows(finetunings: Sequence[FinetuneRun]) -> tuple[FinetuneRow, ...]:
    """Returns the rows. Raises: ConfigError if a fine-tuning has finished with other settings."""
    return tuple(
        FinetuneRow(
            run=one.key,
            state=describe_state(one),
            starts_from=one.starts_from,
            task=one.task,
            title=one.config.data.definition.title,
            layout=one.config.training.layout,
            items_per_step=one.config.training.items_per_step,
            batching=one.config.training.batching,
            epochs=one.config.training.epochs,
            seeds=one.config.run.seeds,
            output_dir=str(one.output_dir),
        )
        for one in finetunings
    )


def finetunings_table(rows: Sequence[FinetuneRow], *, title: str) -> RenderableType:
    """Returns one line per fine-tuning."""
    shown = [
        {
            "run": row.run,
            "state": row.state,
            "task": row.title,
            "step": f"{row.items_per_step:,} {row.batching}, {row.layout}",
            "epochs": row.epochs,
            "seeds": ", ".join(map(str, row.seeds)),
        }
        for row in rows
    ]
    return console.table(shown, title=title)


def arms_text(study: RunsStudyConfig) -> RenderableType:
    """Returns the settings in which the arms differ."""
    lines = []
    for name, phase in study.phases.items():
        lines.append(f"{name}: {phase.base}, seeds {', '.join(map(str, phase.seeds))}")
        for arm, settings in phase.arms.items():
            words = " ".join(f"{key}={value}" for key, value in settings.items())
            lines.append(f"  {arm:24} {words or '(as the run file)'}")
    return console.text("\n".join(lines))


def unfinished_text(ended: Sequence[EndedRun]) -> list[RenderableType]:
    """Lists failed runs with their errors, and unfinished ones."""
    failed = [f"  {one.run.key}: {one.message}" for one in ended if one.state == "failed"]
    to_do = [one.run.key for one in ended if one.state == "unfinished"]
    shown: list[RenderableType] = []
    if failed:
        shown.append(console.text("\n".join(["Failed:", *failed])))
    if to_do:
        shown.append(console.text(f"Not finished: {', '.join(to_do)}. Run the same command again to continue them."))
    return shown
