"""The memory of one GPU of a run, and what fits into it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evenpack.data.order.step_shape import micro_batch_choices
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import FREE_SHARE, MicroBatchSize, micro_batch_size, training_memory
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.models.common.device_peaks import DevicePeak

if TYPE_CHECKING:
    from evenpack.engine.memory.phases import TrainingMemory

_KEEP_PAIRS = ("reference", "sdpa")
"""Backends that keep scores or masks of pairs of slots."""


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


def run_memory(
    config: RunConfig,
    item: AverageItem,
    *,
    vocabulary_size: int,
    ranks: int,
    device: DevicePeak | None,
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


def _notes(config: RunConfig, device: DevicePeak | None) -> Iterator[str]:
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
