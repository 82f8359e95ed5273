"""The memory of a run's GPUs, estimated from its settings before it starts.

The estimate holds for attention kernels that keep no scores. `phases.py` explains the phases of a step, and imports
torch, which this module does when it estimates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from evenpack.data.order.step_shape import micro_batch_choices
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.memory.state import StateSizes, state_bytes
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.models.cost import model_sizes
from evenpack.models.families import family_of
from evenpack.units import BF16_BYTES, FP32_BYTES

if TYPE_CHECKING:
    from evenpack.engine.memory.phases import TrainingMemory
    from evenpack.models.common.device_peaks import DevicePeak

FREE_SHARE = Fraction(1, 10)
"""Part of a device that is left for what the estimate lacks: the context, NCCL's buffers, fragmentation. An assumption:
it was not measured."""

_KEEP_PAIRS = ("reference", "sdpa")
"""Backends that keep scores or masks of pairs of slots."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """The sizes of a micro-batch on which its memory depends."""

    slots: int
    head_rows: int
    """Rows of logits: masked tokens, or all slots of a model that predicts the next tokens."""


@dataclass(frozen=True, kw_only=True)
class FittingMicroBatch:
    """A micro-batch that fits."""

    items_per_micro_batch: int
    total: int
    """Bytes at the peak."""


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The estimated memory of one GPU of a run, and what fits."""

    ranks: int
    items_per_micro_batch: int
    size: MicroBatchSize
    memory: "TrainingMemory"
    total: int
    """Bytes at the peak."""
    device: str | None
    """The device's name; None if none is named, or it is unknown."""
    capacity: int | None
    """The device's bytes; None if they are not known: nothing is said of what fits then."""
    largest: FittingMicroBatch | None
    """The largest micro-batch that fits with the run's settings; None if none does, or the capacity is unknown."""
    notes: tuple[str, ...]

    @property
    def usable(self) -> int | None:
        """Bytes of the device that a run may plan with."""
        return None if self.capacity is None else math.floor(self.capacity * (1 - FREE_SHARE))

    @property
    def fits(self) -> bool | None:
        """Whether the run's micro-batch fits; None if the capacity is unknown."""
        return None if self.usable is None else self.total <= self.usable


def training_memory(config: RunConfig, size: MicroBatchSize, *, vocabulary_size: int, ranks: int) -> "TrainingMemory":
    """Estimates a micro-batch of this size. Raises: ConfigError if the ranks cannot divide a step."""
    from evenpack.engine.memory.phases import estimate_training_memory

    state = _state_sizes(config, vocabulary_size=vocabulary_size, ranks=ranks)
    settings = deepspeed_config(config, ranks)
    return estimate_training_memory(
        config.model,
        vocabulary_size=vocabulary_size,
        max_positions=config.max_positions,
        slots=size.slots,
        head_rows=size.head_rows,
        number_bytes=FP32_BYTES if config.training.precision == "fp32" else BF16_BYTES,
        accumulates=config.training.micro_batches(ranks) > 1,
        state=state_bytes(config.deepspeed.zero_stage, state, settings),
    )


def _state_sizes(config: RunConfig, *, vocabulary_size: int, ranks: int) -> StateSizes:
    from evenpack.engine.optimizers.muon import TOGETHER

    sizes = model_sizes(config.model, vocabulary_size=vocabulary_size, max_positions=config.max_positions)
    largest_group, fewer_states = max(sizes.parameters - sum(sizes.merged), *sizes.merged, 0), 0
    if config.optimizer.kind == "muon":
        alike = max(sizes.matrices, default=0)
        largest_group = min(alike, max(TOGETHER, alike // config.model.shape["layers"]))
        fewer_states = sum(sizes.matrices)
    return StateSizes(
        parameters=sizes.parameters,
        largest_tensor=vocabulary_size * config.model.shape["hidden_size"],
        states=config.optimizer.fp32_states,
        fewer_states=fewer_states,
        temporaries=config.optimizer.fp32_temporaries,
        largest_group=largest_group,
        ranks=ranks,
    )


def micro_batch_size(config: RunConfig, item: AverageItem) -> MicroBatchSize:
    """Returns the size of a micro-batch: exact in the packed layout, else the size with average items.

    Masked tokens are those of an average item, rounded up: a share of its slots, at least one and at most
    `max_predictions` of each of its sequences.
    """
    training = config.training
    if training.layout == "packed":
        each = Fraction(item.row_slots)
    elif training.layout == "unpadded":
        each = item.tokens
    else:
        each = item.sequences * config.data.recipe.max_sequence_length
    slots = math.ceil(training.items_per_micro_batch * each)
    if family_of(config.model).objective == "next_tokens":
        return MicroBatchSize(slots=slots, head_rows=slots)
    masking = config.mask_limits
    share = max(Fraction(masking.share) * item.row_slots, item.sequences)
    masked = math.ceil(min(share, masking.max_predictions * item.sequences))
    return MicroBatchSize(slots=slots, head_rows=training.items_per_micro_batch * masked)


def run_memory(
    config: RunConfig,
    item: AverageItem,
    *,
    vocabulary_size: int,
    ranks: int,
    device: "DevicePeak | None",
) -> RunMemory:
    """Estimates a run whose step is settled. Raises: ConfigError if the ranks cannot divide a step."""
    size = micro_batch_size(config, item)
    memory = training_memory(config, size, vocabulary_size=vocabulary_size, ranks=ranks)
    found = RunMemory(
        ranks=ranks,
        items_per_micro_batch=config.training.items_per_micro_batch,
        size=size,
        memory=memory,
        total=memory.peak.total,
        device=None if device is None else device.name,
        capacity=None if device is None else device.memory_bytes,
        largest=None,
        notes=tuple(_notes(config, device)),
    )
    if found.usable is None:
        return found
    sizes = {"vocabulary_size": vocabulary_size, "ranks": ranks}
    return replace(found, largest=_largest_that_fits(config, item, usable=found.usable, **sizes))


def _notes(config: RunConfig, device: "DevicePeak | None") -> Iterator[str]:
    if config.attention.backend in _KEEP_PAIRS:
        yield f"attention.backend {config.attention.backend} keeps scores or masks, which are not counted"
    if config.training.layout != "packed":
        batching = config.training.batching
        yield f"layout {config.training.layout}: sizes are for average {batching}; the largest need more"
    if device is not None and device.memory_bytes is None:
        yield f"{device.name} is sold with several sizes of memory: nothing is said of what fits"


def _largest_that_fits(
    config: RunConfig, item: AverageItem, *, usable: int, vocabulary_size: int, ranks: int
) -> FittingMicroBatch | None:
    """Returns the largest micro-batch that fits, of those that divide the step on these ranks."""
    for items in reversed(micro_batch_choices(config.training.items_per_step, ranks=ranks)):
        changed = with_micro_batch(config, items)
        size = micro_batch_size(changed, item)
        total = training_memory(changed, size, vocabulary_size=vocabulary_size, ranks=ranks).peak.total
        if total <= usable:
            return FittingMicroBatch(items_per_micro_batch=items, total=total)
    return None


def with_micro_batch(config: RunConfig, items: int) -> RunConfig:
    """Returns the run with so many packs or sequences in a micro-batch."""
    training = config.training
    return config.model_copy(
        update={"training": training.model_copy(update={f"{training.batching}_per_micro_batch": items})}
    )
