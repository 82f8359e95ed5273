"""The plan of a run before it starts, and its report at the end."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenpack.data.order.step_shape import AssignmentPolicy, Batching, Layout
from evenpack.data.prepare.verification import explained_damage
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.reporting.trackers.trackers import require_trackers
from evenpack.engine.resolving.resolve import ResolvedRun, open_run, require_trainable
from evenpack.engine.resolving.step_items import implausible_epochs, items_of_an_epoch
from evenpack.engine.sharding import sharding_at
from evenpack.files import read_json_object
from evenpack.units import counted

if TYPE_CHECKING:
    from evenpack.data.batches.capacity import BatchCapacity
    from evenpack.engine.memory.estimate import RunMemory
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
    """Slots that a rank computes at once; None likewise."""
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
        run.micro_batches(ranks)
        deepspeed_config(run.config.training, run.config.deepspeed, ranks)
        implausible = implausible_epochs(run.config, _epochs(run))
        if implausible is not None:
            log.warning("%s", implausible)
        return run


def plan_training(config: RunConfig, *, ranks: int, device: "DevicePeak | None" = None) -> TrainingPlan:
    """Computes and checks everything that can be known before a process is started.

    Args:
        device: the GPU of each rank, for what fits into its memory; None: unknown.

    Raises: as `check_training`; DataError for a vocabulary that the objective cannot use.
    """
    run = check_training(config, ranks=ranks)
    with explained_damage(config.prepared_dir):
        return _plan(run, ranks=ranks, device=device)


def _plan(run: ResolvedRun, *, ranks: int, device: "DevicePeak | None") -> TrainingPlan:
    from evenpack.engine.memory.estimate import run_memory

    prepared, training = run.prepared, run.config.training
    micro_batches = run.micro_batches(ranks)
    settings = deepspeed_config(training, run.config.deepspeed, ranks)
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
        micro_batches_per_rank=micro_batches,
        steps=training.planned_steps,
        slots_per_step=None if row_slots is None else training.items_per_step * row_slots,
        slots_per_micro_batch=None if row_slots is None else training.items_per_micro_batch * row_slots,
        capacity=run.capacity(ranks),
        tokens_per_step=float(training.items_per_step * item.tokens),
        samples_per_step=float(run.samples_per_step),
        tokens=float(items * item.tokens),
        parameters=run.parameters,
        tokens_per_parameter=float(items * item.tokens / run.parameters),
        epochs=_epochs(run),
        epochs_of_all=items / sum(counts.values()),
        packing_efficiency=item.fill,
        packing_factor=float(item.sequences),
        packing_adjustment=run.adjustment,
        gradient_clipping=_clipping(run.config),
        memory=run_memory(run.config, item, vocabulary_size=prepared.vocabulary_size, ranks=ranks, device=device),
        deepspeed=settings,
    )


def _epochs(run: ResolvedRun) -> dict[str, float]:
    """Returns how many times each source is read in all steps."""
    training = run.config.training
    items = training.planned_steps * training.items_per_step
    counts = items_of_an_epoch(run.prepared, training.batching)
    return {name: float(items * share / counts[name]) for name, share in run.shares.items()}


def _clipping(config: RunConfig) -> str:
    norm = config.training.gradient_clipping
    if norm is None:
        return "off"
    return f"to a norm of {norm:g}, by {sharding_at(config.deepspeed.zero_stage).clips}"


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The main figures of a finished run."""

    step: int
    packing_efficiency: float | None
    """Of an epoch of packs, whatever part of it the run has trained on; None where the layout computes no packs."""
    packing_factor: float | None
    """Sequences per pack, in the same way."""
    padding_share: float
    """Fraction of the slots that the run has computed."""
    ranks: int
    """Ranks of the last step, and of the steps that the rate is of."""
    tokens_per_second: float
    """Real tokens/s over all ranks; the median step, without evaluation and saving."""
    first_loss: float | None
    """In nats/token, next-sentence loss included where there is one; None if it was not finite."""
    last_loss: float | None
    losses_apart: dict[str, float | None]
    """The parts of these two, as in summary.json, of a model that has two losses."""
    target: dict[str, Any] | None
    """Result for training.target_accuracy; None if there is none."""
    validation_loss: dict[str, float | None]
    """Loss of each source, at the last evaluation; None if nothing is held out."""


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
        losses_apart={name: summary[name] for name in summary if name.endswith(("_token_loss", "_next_sentence_loss"))},
        target=summary["target"],
        validation_loss=losses_of(summary["validation"] or {}),
    )


def losses_of(validation: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the validation loss of each source; None if nothing is held out."""
    return {source: values["loss"] if values is not None else None for source, values in validation.items()}
