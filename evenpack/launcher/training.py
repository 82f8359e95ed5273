"""A training run from start to end: its plan before it starts, its start, its report, and each as tables for people."""

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from evenpack import console
from evenpack.console import Report, pairs, percent
from evenpack.data.order.step_shape import AssignmentPolicy, Batching, Layout
from evenpack.data.prepare.verification import explained_damage
from evenpack.engine.config import CHINCHILLA_RATIO, RunConfig, RunSection
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.resolving.data_facts import epochs_of_steps, implausible_epochs, items_of_an_epoch
from evenpack.engine.resolving.requirements import require_trackers, require_trainable
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.errors import CheckpointError, ConfigError, DataError
from evenpack.files import read_json_object
from evenpack.launcher.processes.start import LaunchPlan
from evenpack.launcher.processes.stop import say
from evenpack.launcher.processes.supervise import LaunchResult, supervise
from evenpack.losses import losses_logged_apart
from evenpack.progress import format_rate
from evenpack.units import counted

if TYPE_CHECKING:
    from evenpack.data.batches.capacity import BatchCapacity
    from evenpack.engine.memory.estimate import RunMemory
    from evenpack.engine.memory.rehearsal import RankRehearsal
    from evenpack.models.common.device_peaks import DevicePeak


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The plan of a run: everything that is known before its start, except for the exact count of tokens."""

    ranks: int
    layout: Layout
    batching: Batching
    """The items that the next two count."""
    items_per_step: int
    items_per_micro_batch: int
    assignment: AssignmentPolicy
    micro_batches_per_rank: int
    """Micro-batches in each step; DeepSpeed's gradient accumulation."""
    steps: int
    samples_per_step: float
    """Sequences, on average over an epoch of each source."""
    slots_per_step: int | None
    """Slots; None if they depend on the sequences of a step."""
    slots_per_micro_batch: int | None
    """Slots that a rank computes at once; None if they depend on the sequences of a step."""
    capacity: "BatchCapacity"
    """Sizes of the index arrays of each micro-batch."""
    tokens_per_step: float
    """Real tokens, on average over an epoch of each source."""
    tokens: float
    parameters: int
    """Parameters of the model."""
    tokens_per_parameter: float
    """About 20 are compute-optimal (`training.chinchilla_ratio`)."""
    epochs: dict[str, float]
    """Epochs of each source."""
    epochs_of_all: float
    """Epochs of all sources together, as `training.epochs` counts them."""
    packing_efficiency: float
    """Fraction of the slots of a pack, or of the longest possible sequence, that hold a token."""
    packing_factor: float
    """Sequences per pack; 1 for steps of single sequences."""
    packing_adjustment: tuple[str, ...]
    """The changes by training.packing_adjustment, and the values of tokens per step and of the length; the numbers
    above are those after them."""
    gradient_clipping: str
    """The norm to which gradients are clipped, and the program that does it."""
    initial_weights: str | None
    """The weights from which a new run starts, or why there are none yet; None: those of its seed."""
    memory: "RunMemory"
    """Memory of one GPU, estimated."""
    deepspeed: dict[str, Any]
    """Configuration for `deepspeed.initialize`."""

    def __repr__(self) -> str:
        """Returns a line with the size of the run; `vars` has all values."""
        epochs = ", ".join(f"{epochs:,.2f} epochs of {source}" for source, epochs in self.epochs.items())
        return (
            f"TrainingPlan({self.steps:,} steps of {self.items_per_step:,} {self.batching} on "
            f"{counted(self.ranks, 'rank')}: {self.tokens:,.0f} tokens, {epochs}; {self.parameters:,} parameters)"
        )


def check_training(config: RunConfig, *, ranks: int) -> ResolvedRun:
    """Checks what can be known in a moment, without torch, before a process is started; the ranks check the rest.

    Raises: NotPreparedError or DataError; ConfigError if the ranks cannot divide a step, or
    `training.packing_adjustment` is not possible; and see `require_trainable` and `require_trackers`.
    """
    with explained_damage(config.prepared_dir):
        run = open_run(config)
        require_trainable(run)
        require_trackers(run.config.metrics)
        run.settled.micro_batches(ranks)
        deepspeed_config(run.config, ranks)
        implausible = implausible_epochs(run.config, epochs_of_steps(run.config, run.prepared))
        if implausible is not None:
            log.warning("%s", implausible)
        return run


def plan_training(config: RunConfig, *, ranks: int, device: "DevicePeak | None" = None) -> TrainingPlan:
    """Computes and checks everything that can be known before a process is started.

    Args:
        device: the GPU of each rank, for what fits into its memory; None: unknown.

    Raises: as `check_training`; DataError for a vocabulary that the objective cannot use.
    """
    return plan_checked(check_training(config, ranks=ranks), ranks=ranks, device=device)


def plan_checked(run: ResolvedRun, *, ranks: int, device: "DevicePeak | None") -> TrainingPlan:
    """Computes the plan of a run that `check_training` has returned.

    Raises: DataError for a vocabulary that the objective cannot use, or for damaged data.
    """
    from evenpack.engine.memory.estimate import run_memory

    prepared, training = run.prepared, run.config.training
    with explained_damage(run.config.prepared_dir):
        item, counts = run.item, items_of_an_epoch(prepared, training.batching)
        padded_alike = training.batching == "sequences" and (training.layout, training.policy) == ("padded", "arrival")
        items = training.planned_steps * training.items_per_step
        row_slots = item.row_slots if training.layout == "packed" or padded_alike else None
        return TrainingPlan(
            ranks=ranks,
            layout=training.layout,
            batching=training.batching,
            items_per_step=training.items_per_step,
            items_per_micro_batch=training.items_per_micro_batch,
            assignment=training.policy,
            micro_batches_per_rank=run.settled.micro_batches(ranks),
            steps=training.planned_steps,
            slots_per_step=None if row_slots is None else training.items_per_step * row_slots,
            slots_per_micro_batch=None if row_slots is None else training.items_per_micro_batch * row_slots,
            capacity=run.capacity(ranks),
            tokens_per_step=float(training.items_per_step * item.tokens),
            samples_per_step=float(run.samples_per_step),
            tokens=float(items * item.tokens),
            parameters=run.parameters,
            tokens_per_parameter=float(items * item.tokens / run.parameters),
            epochs=epochs_of_steps(run.config, prepared),
            epochs_of_all=items / sum(counts.values()),
            packing_efficiency=item.fill,
            packing_factor=float(item.sequences),
            packing_adjustment=run.settled.adjustment,
            gradient_clipping=_clipping(run.config),
            initial_weights=_initial_weights(training.initialize_from),
            memory=run_memory(run.config, item, vocabulary_size=prepared.vocabulary_size, ranks=ranks, device=device),
            deepspeed=deepspeed_config(run.config, ranks),
        )


def _initial_weights(path: Path | None) -> str | None:
    """Returns what is found there; an earlier run may still have to write it."""
    from evenpack.engine.checkpoints.weight_sources import find_weights

    try:
        return None if path is None else str(find_weights(path))
    except CheckpointError as error:
        log.warning("training.initialize_from: %s", error)
        return f"none yet: {path}"


def _clipping(config: RunConfig) -> str:
    norm = config.training.gradient_clipping
    if norm is None:
        return "off"
    return f"to a norm of {norm:g}, by {config.deepspeed.sharding.clips}"


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The main figures of a finished run."""

    step: int
    packing_efficiency: float | None
    """Efficiency over an epoch of packs, also for a run of less than one; None where the layout computes no packs."""
    packing_factor: float | None
    """Sequences per pack, in the same way."""
    padding_share: float
    """Fraction of the slots that the run has computed."""
    ranks: int
    """Ranks of the last step, and of the steps over which the rate is measured."""
    tokens_per_second: float
    """Real tokens/s over all ranks; the median step, without evaluation and saving."""
    first_loss: float | None
    """Loss in nats/token, next-sentence loss included where there is one; None if it was not finite."""
    last_loss: float | None
    losses_apart: dict[str, float | None]
    """The parts of these two, as in summary.json, of a model that has several losses."""
    target: dict[str, Any] | None
    """Result for training.target_accuracy; None if there is none."""
    validation_loss: dict[str, float | None]
    """Loss of each source, at the last evaluation; NaN if it was not finite, None if nothing is held out."""


def report_training(run: ResolvedRun) -> TrainingReport | None:
    """Reports from the run's files; None if it has not written its summary."""
    summary = read_json_object(run.config.run.output_dir / "summary.json")
    if summary is None:
        return None
    packed = run.shape.layout == "packed"
    return TrainingReport(
        step=summary["step"],
        packing_efficiency=run.item.fill if packed else None,
        packing_factor=float(run.item.sequences) if packed else None,
        padding_share=summary["padding_share"],
        ranks=summary["ranks"],
        tokens_per_second=summary["tokens_per_second"],
        first_loss=summary["first_loss"],
        last_loss=summary["last_loss"],
        losses_apart={
            f"{end}_{loss.metric}": summary[f"{end}_{loss.metric}"]
            for end in ("first", "last")
            for loss in losses_logged_apart([name.removeprefix("first_") for name in summary])
        },
        target=summary["target"],
        validation_loss={
            source: None if found is None else math.nan if found["loss"] is None else found["loss"]
            for source, found in (summary["validation"] or {}).items()
        },
    )


def describe_run(launch: LaunchPlan | None, plan: TrainingPlan) -> Report:
    """Returns the report of `evenpack train --dry-run`.

    `launch` is None for ranks whose machines are not known.
    """
    from evenpack.engine.memory.text import memory_text

    value = {
        "command": None if launch is None else launch.command,
        "environment": None if launch is None else launch.environment,
        "devices": None if launch is None else launch.devices.choice,
        "plan": plan,
    }
    would_run = f"Would run on {counted(plan.ranks, 'rank')}, as --ranks says; nothing could be started here"
    if launch is not None:
        would_run = f"Would run on {launch.devices.choice}:\n\n{launch.shell_line()}"
    shown = [
        console.text(would_run),
        plan_table(plan),
        console.text(memory_text(plan.memory, batching=plan.batching)),
        console.text(f"DeepSpeed gets {json.dumps(plan.deepspeed, indent=2)}"),
    ]
    return Report(value=value, shown=shown)


@dataclass(frozen=True, kw_only=True)
class TrainingResult(LaunchResult):
    """The outcome of a training run, with its report."""

    output_dir: Path
    report: TrainingReport | None
    """The run's report; None if it failed, or has written no summary."""
    loss_plot: Path | None
    """The plot of losses; None without a report, or if it could not be drawn."""


def run_training(launch: LaunchPlan, checked: ResolvedRun) -> TrainingResult:
    """Trains a run that `check_training` has returned, with the output of the ranks on standard error.

    Raises: ConfigError if a machine of the hostfile is not reached; RunError if the output directory cannot be locked
    or written.
    """
    run = checked.config.run
    launch = launch.reached(os.environ)
    say(f"starting {launch.devices.choice}")
    result = supervise(
        launch, run.output_dir, say=say, output=_standard_error(), hang_timeout_seconds=run.hang_timeout_seconds
    )
    report = report_training(checked) if result.state != "failed" else None
    return TrainingResult(
        **vars(result),
        output_dir=run.output_dir,
        report=report,
        loss_plot=_try_to_draw(run) if report is not None else None,
    )


def describe_result(name: str, result: TrainingResult) -> Report:
    """Returns the report of the run `name` that has ended.

    The reason of a failure or stop is printed on standard error.
    """
    if result.message and result.state == "failed":
        console.print_error(result.message)
    elif result.message:
        say(result.message)
    value: dict[str, Any] = {"state": result.state, "message": result.message, "output_dir": result.output_dir}
    shown: list[RenderableType] = []
    if result.report is not None:
        value |= {"report": result.report, "loss_plot": result.loss_plot}
        shown.append(report_table(result.report, title=f"{name}: {result.state}"))
        if result.loss_plot is not None:
            shown.append(console.text(f"Loss plot: {result.loss_plot}"))
    return Report(value=value, shown=shown, exit_code=result.exit_code)


def _standard_error() -> IO[str] | None:
    """Returns a standard error that child processes can write to; a notebook's own stream may have no file."""
    try:
        sys.stderr.fileno()
    except OSError:
        return sys.__stderr__
    return sys.stderr


def _try_to_draw(run: RunSection) -> Path | None:
    """Draws the loss plot; a run does not fail without it."""
    from evenpack.launcher.loss_plot import plot_loss

    try:
        return plot_loss(run.output_dir, name=run.name)
    except (ConfigError, DataError) as error:
        say(f"no loss plot: {error}")
        return None


@dataclass(frozen=True, kw_only=True)
class RehearsedRanks:
    """The options `--ranks`, `--rank` and `--device` of `evenpack train --dry-run`."""

    ranks: int | None
    rank: int | None
    device: str | None

    def require_valid(self, *, dry_run: bool, places_given: bool) -> None:
        """Checks the options against the others. Raises: ConfigError."""
        given = {"--ranks": self.ranks, "--rank": self.rank, "--device": self.device}
        names = [name for name, value in given.items() if value is not None]
        if names and not dry_run:
            raise ConfigError(f"{', '.join(names)}: for --dry-run alone; training takes the ranks that it can start")
        if self.ranks is not None and places_given:
            raise ConfigError(
                "--ranks is for ranks without machines: leave --num-gpus, --cpu-ranks and --hostfile out, or leave "
                "--ranks out"
            )

    def known_device(self) -> "DevicePeak | None":
        """Returns the named device, or this machine's; None if it has no GPU, or an unknown one.

        Raises: ConfigError for a name that is not known.
        """
        import torch

        from evenpack.models.common.device_peaks import find_device_peak, known_device

        if self.device is not None:
            return find_device_peak(self.device)
        return known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None

    def rehearse(self, run: ResolvedRun, *, ranks: int) -> "tuple[RankRehearsal, RenderableType]":
        """Rehearses the first step of the rank in a run, and returns it with its table; once in a process.

        Raises: ConfigError if there is no such rank, or if the ranks cannot divide a step; DataError for damaged data.
        """
        from evenpack.engine.memory.rehearsal import rehearse

        assert self.rank is not None, "asked for"
        with explained_damage(run.config.prepared_dir):
            found = rehearse(run, rank=self.rank, ranks=ranks)
        return found, rehearsal_table(found, run.config.training.batching)


def plan_table(plan: TrainingPlan) -> Table:
    """Returns the plan of a run as a table."""
    epochs = ", ".join(f"{epochs:.2f} of {source}" for source, epochs in plan.epochs.items())
    if len(plan.epochs) > 1:
        epochs += f"; {plan.epochs_of_all:.2f} of all sources"
    adjusted = {"adjusted": "\n".join(plan.packing_adjustment)} if plan.packing_adjustment else {}
    packing = f"{percent(plan.packing_efficiency)} efficient, {plan.packing_factor:.3f} sequences per pack"
    if plan.batching == "sequences":
        packing = f"none; {percent(plan.packing_efficiency)} of the longest length on average"
    return pairs(
        adjusted
        | {
            "step": f"{plan.items_per_step} {plan.batching} = {counted(plan.ranks, 'rank')} x "
            f"{plan.micro_batches_per_rank} micro-batches (gradient accumulation) x "
            f"{plan.items_per_micro_batch} {plan.batching}",
            "assignment": plan.assignment,
            "steps": plan.steps,
            "sequences per step": f"{plan.samples_per_step:,.1f} on average",
            "total sequences": f"{plan.steps * plan.samples_per_step:,.0f} on average",
            "slots per step": "as many as its sequences need" if plan.slots_per_step is None else plan.slots_per_step,
            "micro-batch": _shapes(plan),
            "tokens per step": f"{plan.tokens_per_step:,.0f} on average",
            "total tokens": f"{plan.tokens:,.0f} on average",
            "tokens per parameter": f"{plan.tokens_per_parameter:,.3g}, of {plan.parameters:,} parameters "
            f"(compute-optimal for causal models: about {CHINCHILLA_RATIO})",
            "epochs": epochs,
            "packing": packing,
            "gradient clipping": plan.gradient_clipping,
            **({} if plan.initial_weights is None else {"initial weights": plan.initial_weights}),
        },
        title="Plan",
    )


def _shapes(plan: TrainingPlan) -> str:
    """Returns the sizes of a micro-batch's arrays, and what they suit badly."""
    from evenpack.data.batches.capacity import ROW_MULTIPLE

    slots, sizes = plan.slots_per_micro_batch, plan.capacity
    if sizes.follows:
        return "as many slots, segments and sequences as it needs"
    origin = "the fullest packs together"
    if sizes.counted is not None:
        is_all = sizes.counted.stop == plan.steps
        origin = (
            f"all {plan.steps:,} steps" if is_all else f"the first {counted(sizes.counted.stop, 'step')}; they may grow"
        )
    shown = [
        "as many slots as its sequences need" if slots is None else f"{slots:,} slots",
        f"room for {sizes.segments:,} segments, {sizes.sequences:,} sequences"
        f"{f', {sizes.targets:,} masked tokens' if sizes.targets else ''} (the most of {origin})",
    ]
    if slots is not None and slots % ROW_MULTIPLE:
        shown.append(
            f"{slots:,} is not a multiple of {ROW_MULTIPLE}, for which a GPU's matrix products are made: change "
            f"{plan.batching}_per_micro_batch, or prepare with another pack_length"
        )
    return "; ".join(shown)


def report_table(report: TrainingReport, *, title: str) -> Table:
    """Returns the report of a finished run as a table."""
    values: dict[str, Any] = {"steps": report.step}
    if report.packing_efficiency is not None and report.packing_factor is not None:
        values["packing, all data"] = (
            f"{percent(report.packing_efficiency)} efficient, {report.packing_factor:.3f} sequences per pack"
        )
    values |= {
        "padding share, these steps": percent(report.padding_share),
        f"tokens/s on {counted(report.ranks, 'rank')}": format_rate(report.tokens_per_second),
        **_training_losses(report),
    }
    if report.target is not None:
        values[f"target accuracy {percent(report.target['accuracy'])}"] = _target(report.target)
    kind = "token loss" if report.losses_apart else "loss"
    for source, loss in report.validation_loss.items():
        values[f"validation {kind}, {source}"] = _loss(loss) if loss is not None else "nothing held out"
    return pairs(values, title=title)


def _training_losses(report: TrainingReport) -> dict[str, str]:
    """Returns the losses as text, each separately if there are several, since validation has only the main one."""
    if not report.losses_apart:
        return {"first loss": _loss(report.first_loss), "last loss": _loss(report.last_loss)}
    ends = [name.removeprefix("first_") for name in report.losses_apart]
    return {
        f"{end} {loss.title}": _loss(report.losses_apart[f"{end}_{loss.metric}"])
        for loss in losses_logged_apart(ends)
        for end in ("first", "last")
    }


def _target(target: Mapping[str, Any]) -> str:
    if not target["reached"]:
        return "not reached"
    samples, minutes = target["samples"], target["seconds"] / 60
    return f"reached with {percent(target['reached_accuracy'])} after {samples:,} sequences, {minutes:,.2f} minutes"


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else "not finite"


def rehearsal_table(found: "RankRehearsal", batching: Batching) -> Table:
    """Returns the first step of one rank as a table."""
    peak = found.memory.peak
    size = f"{_range(found.items)} {batching} and {_range(found.slots)} slots"
    return pairs(
        {
            "micro-batches": f"{len(found.items)}, of {size} each",
            "sequences": found.sequences,
            "tokens": f"{found.tokens:,}, {found.tokens / found.tokens_of_the_mean_rank:.4f} x the mean rank's",
            "targets": found.targets,
            "cost": f"{found.cost_over_mean:.4f} x the mean rank's; the most expensive rank's is "
            f"{found.largest_cost_over_mean:.4f} x",
            "memory": f"{peak.total / 1e9:,.2f} GB on a GPU at the peak ({peak.phase}), estimated",
            "faked step": f"forward, backward, reduction, update; a gradient of {found.faked_gradients:,} numbers",
        },
        title=f"First step of rank {found.rank:,} of {found.ranks:,}",
    )


def _range(numbers: tuple[int, ...]) -> str:
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"
