"""The packs of step t and their assignment to ranks: a pure function, the same on every rank.

If a run counts single sequences, each of them is a pack of one.

The packs depend on (seed, step) and the prepared data alone. World size, accumulation and balancing only change
`shares`: which rank computes which packs of the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, Real

from evenpack.data.order.assignment import StepAssignment, assign_step
from evenpack.data.order.mixture import MixtureSchedule
from evenpack.data.order.selection import PackedSource, PackSelection, select_packs
from evenpack.data.order.step_shape import CostWeights, StepShape
from evenpack.data.order.weight_change import WeightChange
from evenpack.data.sequences import SequenceView
from evenpack.kernels.visible_pairs import visible_pairs
from evenpack.losses import StepCounts


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All packs of one step, and their assignment."""

    step: int
    packs: PackSelection
    counts: StepCounts
    shares: StepAssignment
    """Assignment of indices into `packs`."""
    costs: Float64[np.ndarray, " packs"]
    """Cost of each pack to its rank, in the unit of the shape's weights."""
    micro_batches: int
    """Micro-batches of each rank."""

    def cost(self, rank: int) -> float:
        """Returns the cost of all that `rank` computes."""
        first = rank * self.micro_batches
        start, stop = self.shares.offsets[[first, first + self.micro_batches]]
        return float(self.costs[self.shares.items[start:stop]].sum())

    def micro_batch(self, rank: int, index: int) -> PackSelection:
        """Returns the packs that `rank` computes as its micro-batch `index`."""
        return self.packs.take(self.shares.share(rank * self.micro_batches + index))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLoads:
    """What each of the N packs of one step holds, and their assignment."""

    sequences: Int64[np.ndarray, " N"]
    segments: Int64[np.ndarray, " N"]
    tokens: Int64[np.ndarray, " N"]
    """Slots that are not padding of the pack."""
    targets: Int64[np.ndarray, " N"]
    shares: StepAssignment

    def largest_share(self, values: Int64[np.ndarray, " N"]) -> int:
        """Returns the greatest sum of `values` over the packs of a micro-batch of any rank."""
        return int(np.add.reduceat(values[self.shares.items], self.shares.offsets[:-1]).max())


@runtime_checkable
class TargetCounter(Protocol):
    """The part of an objective (`objectives.py`) that a plan needs."""

    def count_targets(
        self,
        view: SequenceView,
        sequence_ids: Int64[np.ndarray, " K"],
        lengths: Int64[np.ndarray, " K"],
        segments: Int64[np.ndarray, " K"],
    ) -> Int64[np.ndarray, " K"]:
        """Returns the targets of these sequences of the view, from length and number of segments or a stored column.

        It reads no token. Raises: DataError if the column is damaged.
        """


_DRAWN_AT_ONCE = 1 << 16
"""Packs whose loads are computed together: larger arrays are no faster."""


class StepPlanner:
    """Plans any step in one vectorised call; holds no state that a step could change."""

    def __init__(
        self,
        sources: Sequence[PackedSource],
        weights: Sequence[int],
        *,
        shape: StepShape,
        ranks: int,
        objective: TargetCounter,
        changes: Sequence[WeightChange] = (),
    ) -> None:
        """Takes the `weights` of the sources that hold until the first of `changes`.

        Raises: ConfigError if these ranks cannot divide a step.
        """
        self.objective = objective
        self.sources = tuple(sources)
        self.mixture = MixtureSchedule(weights, changes, items_per_step=shape.items_per_step)
        self.shape = shape
        self.ranks = ranks
        self.micro_batches = shape.micro_batches(ranks)

    def plan(self, step: int) -> StepPlan:
        """Plans the step (counted from 0) over all ranks. Reads lengths, never tokens."""
        packs = self._draw(step, step + 1)
        per_sequence = self._statistics(packs)
        statistics = _by_pack(packs, per_sequence)
        counts = StepCounts(
            packs=packs.packs,
            sequences=len(packs.sequence_ids),
            tokens=int(statistics.tokens.sum() - per_sequence.padding.sum()),
            targets=int(per_sequence.targets.sum()),
        )
        costs = item_costs(self.shape.cost_weights, statistics)
        shares = assign_step(self.shape, statistics.tokens, costs, ranks=self.ranks)
        return StepPlan(
            step=step, packs=packs, counts=counts, shares=shares, costs=costs, micro_batches=self.micro_batches
        )

    def loads(self, steps: range) -> Iterator[StepLoads]:
        """Yields the loads of steps from the first to the last, at less cost than their plans: drawn many at once."""
        size = self.shape.items_per_step
        at_once = max(1, _DRAWN_AT_ONCE // size)
        for first in range(steps.start, steps.stop, at_once):
            packs = self._draw(first, min(first + at_once, steps.stop))
            per_sequence = self._statistics(packs)
            statistics = _by_pack(packs, per_sequence)
            targets, sequences = _sum_by_pack(per_sequence.targets, packs.offsets), np.diff(packs.offsets)
            costs = item_costs(self.shape.cost_weights, statistics)
            for start in range(0, packs.packs, size):
                step = slice(start, start + size)
                yield StepLoads(
                    sequences=sequences[step],
                    segments=statistics.segments[step],
                    tokens=statistics.tokens[step],
                    targets=targets[step],
                    shares=assign_step(self.shape, statistics.tokens[step], costs[step], ranks=self.ranks),
                )

    def _draw(self, first_step: int, stop_step: int) -> PackSelection:
        size = self.shape.items_per_step
        return select_packs(self.sources, *self.mixture.draws(first_step * size, stop_step * size))

    def _statistics(self, packs: PackSelection) -> "_SequenceStatistics":
        sequence_sources = np.repeat(packs.sources, np.diff(packs.offsets))
        windows = self.shape.cost_weights.per_pair_within
        count = len(packs.sequence_ids)
        targets, squared_lengths, segments, padding = np.empty((4, count), dtype=np.int64)
        found = _SequenceStatistics(
            targets=targets,
            squared_lengths=squared_lengths,
            segments=segments,
            padding=padding,
            pairs_within={window: np.empty(count, dtype=np.int64) for window in windows},
        )
        for index, source in enumerate(self.sources):
            members = sequence_sources == index
            lengths, sequence_ids = packs.lengths[members], packs.sequence_ids[members]
            found.segments[members], found.squared_lengths[members] = source.view.statistics(sequence_ids, lengths)
            padding_counts = source.view.padding_counts(sequence_ids)
            found.padding[members] = 0 if padding_counts is None else padding_counts.tokens
            found.targets[members] = self.objective.count_targets(
                source.view, sequence_ids, lengths, found.segments[members]
            )
            if windows:
                segment_lengths, per_sequence = source.view.segments(sequence_ids)
                ends = np.cumsum(per_sequence)
                for window, pairs in found.pairs_within.items():
                    of_segments = visible_pairs(segment_lengths, window=window, causal=False)
                    pairs[members] = _sum_by_pack(of_segments, np.append(0, ends))
        return found


class _SequenceStatistics(NamedTuple):
    """The statistics of each sequence of a step."""

    targets: Int64[np.ndarray, " M"]
    squared_lengths: Int64[np.ndarray, " M"]
    """Sum of length² over the sequence's segments."""
    segments: Int64[np.ndarray, " M"]
    padding: Int64[np.ndarray, " M"]
    """Tokens that only pad the sequence."""
    pairs_within: Mapping[int, Int64[np.ndarray, " M"]]
    """For each window that costs something, the pairs of tokens of one segment that are at most so far apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackStatistics:
    """The statistics from which the cost of packs, or of any items, is computed."""

    tokens: Int64[np.ndarray, "*items"]
    squared_lengths: Real[np.ndarray, "*items"]
    """Sum of length² over segments: the work of attention in layers without a window."""
    segments: Int64[np.ndarray, "*items"]
    pairs_within: Mapping[int, Int64[np.ndarray, "*items"]]
    """The same in layers with a window, for each of them."""


def item_costs(weights: CostWeights, statistics: PackStatistics) -> Float64[np.ndarray, "*items"]:
    """Returns the cost of each item to a rank, in the unit of the weights."""
    costs: Float64[np.ndarray, "*items"] = (
        weights.per_token * statistics.tokens + weights.per_squared_length * statistics.squared_lengths
    )
    for window, per_pair in weights.per_pair_within.items():
        costs = costs + per_pair * statistics.pairs_within[window]
    return costs + weights.per_segment * statistics.segments if weights.per_segment else costs


def _by_pack(packs: PackSelection, per_sequence: _SequenceStatistics) -> PackStatistics:
    return PackStatistics(
        tokens=_sum_by_pack(packs.lengths, packs.offsets),
        squared_lengths=_sum_by_pack(per_sequence.squared_lengths, packs.offsets),
        segments=_sum_by_pack(per_sequence.segments, packs.offsets),
        pairs_within={
            window: _sum_by_pack(pairs, packs.offsets) for window, pairs in per_sequence.pairs_within.items()
        },
    )


def _sum_by_pack(values: Int64[np.ndarray, " M"], offsets: Int64[np.ndarray, " N_plus_1"]) -> Int64[np.ndarray, " N"]:
    cumulated = np.concatenate([[0], np.cumsum(values)])
    sums: Int64[np.ndarray, " N"] = cumulated[offsets[1:]] - cumulated[offsets[:-1]]
    return sums
