"""Reduces the values of a step over all ranks: a sum of a vector and a maximum, where the host waits for the device.

The size of both is independent of the number of ranks. Values of single ranks are gathered rarely (`rank_times.py`).
A name that begins with an underscore is a sum from which other values are computed, or with `_max` at its end a
maximum; it is not a metric of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Float64
from torch import Tensor

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.engine import LocalStep
from evenpack.engine.reporting.definitions import Reduction, find_metric
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.losses import Loss, StepCounts
from evenpack.models.common.losses import Denominators

_LIMBS = 4
_LIMB_BITS = 16
"""A 64-bit number is sent as four 16-bit ones, whose sums over ranks float64 represents exactly."""

_LIMB = "_order_hash_{}"
_SOURCE_TOKENS = "_source_tokens_{}"
_LOSS_SUM = "_loss_sum_{}"
_OPTIMISED = "_optimised_{}"
_CORRECT = "_correct_{}"
_PAIRS_WITHIN = "_pairs_within_{}"
"""Names of the parts of values that are more than one number."""

RankValue = int | float | Tensor
"""One measured number; a tensor is on the rank's device, with which the host synchronises once."""


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
    stop: bool
    """Whether a stop was requested on any rank."""
    counts: StepCounts
    """The counts of what the ranks collated."""
    squared_lengths: int
    """Sum of length² over segments, padding left out."""
    pairs_within: Mapping[int, int]
    """The same for layers with a window: the pairs of tokens of a segment that are at most so far apart."""
    padding_targets: int
    """Number of targets that are padding within sequences."""
    order_hash: int
    """Sum mod 2**64 over what the ranks collated; it does not depend on the assignment to ranks."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source, in the mixture's order."""
    reduced: Mapping[str, int | float]
    """All reduced values by name."""
    metrics: Mapping[str, int | float]
    """Measured values that go into the step's record unchanged (`definitions.py`)."""

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the global mean gradient before clipping."""
        return self.metrics["gradient_norm"]

    @property
    def slots(self) -> int:
        """Number of slots, padding included."""
        return int(self.metrics["slots"])

    @property
    def loss_per_real_target(self) -> float:
        """The main loss's sum divided by the number of targets that are not padding.

        The sum includes the loss of padding, so the quotient is at least the mean loss of real targets; it approaches
        that mean as the loss of padding becomes negligible.
        """
        main = next(iter(self.losses.values()))
        return main.loss_sum / max(self.counts.targets - self.padding_targets, 1)

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
    others: Mapping[str, RankValue] = MappingProxyType({}),
) -> StepTotals:
    """Returns the totals of a step over all ranks; every rank calls it once per step.

    Args:
        others: further values of this rank to reduce, whose names begin with an underscore.

    Raises: RunError if the ranks together did not collate what this rank's plan of the step holds.
    """
    measured = _measured(batches, local, stop=stop, loader_seconds=loader_seconds)
    totals = _totals(reduce_over_ranks(world, measured | dict(others)), denominators)
    if totals.counts != batches.counts:
        raise RunError(
            f"step {batches.step + 1}: the plan of rank {world.rank} has {batches.counts}, the ranks together "
            f"collated {totals.counts}: do all ranks read the same prepared data and the same run file?"
        )
    return totals


def _measured(batches: StepBatches, local: LocalStep, *, stop: bool, loader_seconds: float) -> dict[str, RankValue]:
    """Returns the values measured on this rank. A new metric is a line here and one in `definitions.py`."""
    micro_batches = batches.micro_batches
    counts = sum((batch.local_counts for batch in micro_batches[1:]), micro_batches[0].local_counts)
    order_hash = sum(batch.order_hash for batch in micro_batches)
    source_tokens = [sum(tokens) for tokens in zip(*(batch.source_tokens for batch in micro_batches), strict=True)]
    compute_seconds = local.stopwatch.seconds()
    loss_sums = {name: sums.double().sum() for name, sums in local.loss_sums.items()}
    return {
        "gradient_norm": local.gradient_norm,
        "tokens": counts.tokens,
        "targets": counts.targets,
        "sequences": counts.sequences,
        "slots": sum(batch.slots for batch in micro_batches),
        "segment_room": max(len(batch.cu_seqlens) - 1 for batch in micro_batches),
        "host_to_device_bytes": sum(batch.moved_bytes for batch in micro_batches),
        "compute_seconds_mean": compute_seconds,
        "compute_seconds_max": compute_seconds,
        "loader_seconds": loader_seconds,
        **{_LOSS_SUM.format(name): loss_sum for name, loss_sum in loss_sums.items()},
        **{_OPTIMISED.format(name): loss for name, loss in local.optimised_losses.items()},
        **{_CORRECT.format(name): correct for name, correct in local.correct.items()},
        "_stop": stop,
        "_packs": counts.packs,
        "_squared_lengths": sum(batch.squared_lengths for batch in micro_batches),
        **{
            _PAIRS_WITHIN.format(window): sum(batch.pairs_within[window] for batch in micro_batches)
            for window in micro_batches[0].pairs_within
        },
        "_padding_targets": sum(batch.padding_targets for batch in micro_batches),
        **{_LIMB.format(index): (order_hash >> (_LIMB_BITS * index)) % (1 << _LIMB_BITS) for index in range(_LIMBS)},
        **{_SOURCE_TOKENS.format(index): tokens for index, tokens in enumerate(source_tokens)},
    }


def _totals(reduced: Mapping[str, int | float], denominators: Denominators) -> StepTotals:
    whole = {name: int(value) for name, value in reduced.items() if isinstance(value, int)}
    within = _PAIRS_WITHIN.format("")
    sources = sum(name.startswith(_SOURCE_TOKENS.format("")) for name in reduced)
    return StepTotals(
        losses={
            name: LossTotals(
                loss_sum=reduced[_LOSS_SUM.format(name)],
                denominator=denominator,
                optimised=reduced[_OPTIMISED.format(name)],
                correct=whole.get(_CORRECT.format(name)),
            )
            for name, denominator in denominators.items()
        },
        stop=whole["_stop"] > 0,
        counts=StepCounts(
            packs=whole["_packs"],
            sequences=whole["sequences"],
            tokens=whole["tokens"],
            targets=whole["targets"],
        ),
        squared_lengths=whole["_squared_lengths"],
        pairs_within={
            int(name.removeprefix(within)): pairs for name, pairs in whole.items() if name.startswith(within)
        },
        padding_targets=whole["_padding_targets"],
        order_hash=sum(whole[_LIMB.format(index)] << (_LIMB_BITS * index) for index in range(_LIMBS)) % (1 << 64),
        source_tokens=tuple(whole[_SOURCE_TOKENS.format(index)] for index in range(sources)),
        reduced=reduced,
        metrics={name: value for name, value in reduced.items() if not name.startswith("_")},
    )


def reduce_over_ranks(world: World, values: Mapping[str, RankValue]) -> dict[str, int | float]:
    """Returns the reduced values by name; every rank calls it with the same names. Whole numbers stay whole.

    Raises: ValueError for a name that is not a metric, or is not measured on the ranks.
    """
    reductions = {name: reduction_of(name) for name in values}
    sums = [name for name in values if reductions[name] != "max"]
    maxima = [name for name in values if reductions[name] == "max"]
    names = [*_tensors_first(sums, values), *_tensors_first(maxima, values)]
    shares = {name: _share(values[name], reductions[name], world) for name in names}
    reduced = world.all_sum(_vector(list(shares.values()), world), maxima=len(maxima)).tolist()
    found = dict(zip(names, reduced, strict=True))
    return {name: round(found[name]) if _is_whole(shares[name]) else found[name] for name in values}


def reduction_of(name: str) -> Reduction:
    """Returns the reduction of a name. Raises: ValueError; see `reduce_over_ranks`."""
    if name.startswith("_"):
        return "max" if name.endswith("_max") else "sum"
    reduction = find_metric(tuple(name.split("/"))).over_ranks
    if reduction is None:
        raise ValueError(f"'{name}' is computed from other metrics: give it a reduction to measure it on the ranks")
    return reduction


def _tensors_first(names: Sequence[str], values: Mapping[str, RankValue]) -> list[str]:
    return sorted(names, key=lambda name: not isinstance(values[name], Tensor))


def _share(value: RankValue, reduction: Reduction, world: World) -> RankValue:
    """Returns this rank's summand; for a maximum, its value."""
    if reduction == "mean":
        return value / world.size
    if reduction == "same" and not world.is_main:
        return torch.zeros_like(value) if isinstance(value, Tensor) else 0  # no product: infinity times 0 is NaN
    return value


def _vector(shares: Sequence[RankValue], world: World) -> Float64[Tensor, " n"]:
    """Returns the shares in the given order; the values on the host are copied to the device together."""
    on_host = torch.tensor([one for one in shares if not isinstance(one, Tensor)], dtype=torch.float64)
    moved = iter(on_host.to(world.device, non_blocking=True).unbind())
    return torch.stack([one.double() if isinstance(one, Tensor) else next(moved) for one in shares])


def _is_whole(share: RankValue) -> bool:
    return not share.is_floating_point() if isinstance(share, Tensor) else isinstance(share, int)
