"""Reduces the values of a step over all ranks: a sum of a vector and a maximum, where the host waits for the device.

The size of both is independent of the number of ranks. Values of single ranks are gathered rarely (`rank_times.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.engine import LocalStep
from evenpack.engine.reporting.rank_waits import Arrival, WaitSums, WaitValues
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.losses import Loss, StepCounts
from evenpack.models.common.loss_sums import Denominators

_LIMBS = 4
_LIMB_BITS = 16
"""A 64-bit number is sent as four 16-bit ones, whose sums over ranks float64 represents exactly."""

RankValue = int | float | Tensor
"""One measured number; a tensor is on the rank's device, with which the host synchronises once."""

SumsT = TypeVar("SumsT")
MaximaT = TypeVar("MaximaT")


@dataclass(frozen=True, kw_only=True)
class RankSums:
    """What a rank adds to a step; over all ranks, the sums. The names are those of metrics, where there is one."""

    stop: int
    """1 if a stop was requested."""
    counts: StepCounts
    slots: int
    host_to_device_bytes: int
    squared_lengths: int
    pairs_within: Mapping[int, int]
    source_tokens: tuple[int, ...]
    order_hash: tuple[int, ...]
    """Its limbs."""
    gradient_norm: RankValue
    """Of all ranks together, on rank 0; 0 on the others."""
    loss_sums: Mapping[str, RankValue]
    optimised_losses: Mapping[str, RankValue]
    correct: Mapping[str, RankValue]
    compute_seconds: float
    loader_seconds: float
    waits: WaitSums | None
    """What splits the waits by cause; None if they are not split."""


@dataclass(frozen=True, kw_only=True)
class RankMaxima:
    """What a rank has at most in a step; over all ranks, the maxima."""

    segment_room: int
    compute_seconds: float
    left_eager: int | None
    waits: Arrival | None


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """The totals of one loss over a step."""

    loss_sum: float
    """Sum of the loss in nats over the step's targets."""
    denominator: float
    """The exact denominator of the sum."""
    optimised: float
    """The loss whose gradient was taken; it differs from the mean where `loss_balancing` is not exact."""
    correct: int | None
    """Number of targets that were predicted correctly; None for a loss without targets."""

    @property
    def mean(self) -> float:
        """Mean over targets, over the means of sequences or of packs; 0 for a step without any."""
        return self.loss_sum / self.denominator


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The totals of one step over all ranks."""

    losses: Mapping[str, LossTotals]
    """The model's losses by name, the main one first."""
    sums: RankSums
    maxima: RankMaxima
    ranks: int

    @property
    def counts(self) -> StepCounts:
        """The counts of what the ranks collated."""
        return self.sums.counts

    @property
    def order_hash(self) -> int:
        """Sum mod 2**64 over what the ranks collated; it does not depend on the assignment to ranks."""
        return sum(limb << (_LIMB_BITS * index) for index, limb in enumerate(self.sums.order_hash)) % (1 << 64)

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the global mean gradient before clipping."""
        return float(self.sums.gradient_norm)

    @property
    def waits(self) -> WaitValues | None:
        """What splits the waits by cause; None if they are not split."""
        sums, maxima = self.sums.waits, self.maxima.waits
        return None if sums is None or maxima is None else (sums, maxima)

    @property
    def metrics(self) -> dict[str, int | float]:
        """Measured values that go into the step's record unchanged, by the names of their metrics."""
        sums, maxima = self.sums, self.maxima
        return {
            "gradient_norm": self.gradient_norm,
            "tokens": sums.counts.tokens,
            "targets": sums.counts.targets,
            "sequences": sums.counts.sequences,
            "slots": sums.slots,
            "segment_room": maxima.segment_room,
            "host_to_device_bytes": sums.host_to_device_bytes,
            "compute_seconds_mean": sums.compute_seconds / self.ranks,
            "compute_seconds_max": maxima.compute_seconds,
            "loader_seconds": sums.loader_seconds / self.ranks,
        } | ({} if maxima.left_eager is None else {"left_eager": maxima.left_eager})

    @property
    def loss_per_real_target(self) -> float:
        """The main loss's sum divided by the number of targets that are not padding.

        The sum includes the loss of padding, so the quotient is at least the mean loss of real targets; it approaches
        that mean as the loss of padding becomes negligible.
        """
        main = next(iter(self.losses.values()))
        return main.loss_sum / max(self.counts.real_targets, 1)

    @property
    def loss(self) -> float:
        """The sum of all losses."""
        return sum(loss.mean for loss in self.losses.values())

    def accuracy(self, loss: Loss) -> float:
        """Returns the share of a loss's targets that were predicted correctly."""
        correct = self.losses[loss.name].correct
        assert correct is not None, "a loss with targets"
        return correct / max(self.counts.of(loss.counted_by), 1)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def sum_over_ranks(
    world: World,
    batches: StepBatches,
    local: LocalStep,
    denominators: Denominators,
    *,
    stop: bool,
    loader_seconds: float,
    waits: WaitValues | None = None,
) -> StepTotals:
    """Returns the totals of a step over all ranks; every rank calls it once per step.

    Raises: RunError if the ranks together did not collate what this rank's plan of the step holds.
    """
    micro_batches = batches.micro_batches
    order_hash = sum(batch.order_hash for batch in micro_batches)
    compute_seconds = local.stopwatch.seconds()
    norm: RankValue = local.gradient_norm
    if not world.is_main:  # no product: infinity times 0 is NaN
        norm = torch.zeros_like(norm) if isinstance(norm, Tensor) else 0.0
    wait_sums, wait_maxima = waits or (None, None)
    sums, maxima = reduce_over_ranks(
        world,
        RankSums(
            stop=int(stop),
            counts=sum((batch.local_counts for batch in micro_batches[1:]), micro_batches[0].local_counts),
            slots=sum(batch.slots for batch in micro_batches),
            host_to_device_bytes=sum(batch.moved_bytes for batch in micro_batches),
            squared_lengths=sum(batch.squared_lengths for batch in micro_batches),
            pairs_within={
                window: sum(batch.pairs_within[window] for batch in micro_batches)
                for window in micro_batches[0].pairs_within
            },
            source_tokens=tuple(
                sum(tokens) for tokens in zip(*(batch.source_tokens for batch in micro_batches), strict=True)
            ),
            order_hash=tuple((order_hash >> (_LIMB_BITS * index)) % (1 << _LIMB_BITS) for index in range(_LIMBS)),
            gradient_norm=norm,
            loss_sums={name: losses.double().sum() for name, losses in local.loss_sums.items()},
            optimised_losses=local.optimised_losses,
            correct=local.correct,
            compute_seconds=compute_seconds,
            loader_seconds=loader_seconds,
            waits=wait_sums,
        ),
        RankMaxima(
            segment_room=max(len(batch.cu_seqlens) - 1 for batch in micro_batches),
            compute_seconds=compute_seconds,
            left_eager=local.left_eager,
            waits=wait_maxima,
        ),
    )
    if sums.counts != batches.counts:
        raise RunError(
            f"step {batches.step + 1}: the plan of rank {world.rank} has {batches.counts}, the ranks together "
            f"collated {sums.counts}: do all ranks read the same prepared data and the same run file?"
        )
    losses = {
        name: LossTotals(
            loss_sum=float(sums.loss_sums[name]),
            denominator=denominator,
            optimised=float(sums.optimised_losses[name]),
            correct=int(sums.correct[name]) if name in sums.correct else None,
        )
        for name, denominator in denominators.items()
    }
    return StepTotals(losses=losses, sums=sums, maxima=maxima, ranks=world.size)


def reduce_over_ranks(world: World, sums: SumsT, maxima: MaximaT) -> tuple[SumsT, MaximaT]:
    """Returns dataclasses of numbers with the sums and the maxima over ranks. Whole numbers stay whole.

    Every rank calls it with the same fields.
    """
    added, greatest = list(_numbers(sums)), list(_numbers(maxima))
    values = iter(world.all_sum(_vector([*added, *greatest], world), maxima=len(greatest)).tolist())
    return _with_numbers(sums, values), _with_numbers(maxima, values)


def _numbers(value: Any) -> Iterator[RankValue]:
    """Yields the numbers in dataclasses, mappings and tuples, in their order."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, Mapping | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(one)
    elif value is not None:
        yield value


def _with_numbers(value: Any, numbers: Iterator[float]) -> Any:
    """Returns the same dataclass, mapping or tuple with other numbers."""
    if is_dataclass(value):
        values = {field.name: _with_numbers(getattr(value, field.name), numbers) for field in fields(value)}
        return replace(value, **values)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        return {name: _with_numbers(one, numbers) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_with_numbers(one, numbers) for one in value)
    if value is None:
        return None
    is_whole = not value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, int)
    return round(next(numbers)) if is_whole else next(numbers)


def _vector(values: list[RankValue], world: World) -> Float64[Tensor, " n"]:
    """Returns the values in the given order; those on the host are copied to the device together."""
    on_host = torch.tensor([one for one in values if not isinstance(one, Tensor)], dtype=torch.float64)
    moved = iter(on_host.to(world.device, non_blocking=True).unbind())
    return torch.stack([one.double() if isinstance(one, Tensor) else next(moved) for one in values])
