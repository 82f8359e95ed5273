"""The packs of step t and their assignment to ranks: a pure function, the same on every rank.

If a run counts single sequences, each of them is a pack of one.

The packs depend on (seed, step) and the prepared data alone. World size, accumulation and balancing only change
`shares`: which rank computes which packs of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.batch import StepCounts
from evenpack.data.order.assignment import StepAssignment, assign_step
from evenpack.data.order.mixture_schedule import MixtureSchedule
from evenpack.data.order.selection import PackedSource, PackSelection, select_packs
from evenpack.data.order.step_shape import CostWeights, StepShape
from evenpack.data.order.weight_change import WeightChange
from evenpack.data.sequences import SequenceView


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
        first = step * self.shape.items_per_step
        packs = select_packs(self.sources, *self.mixture.draws(first, first + self.shape.items_per_step))
        per_sequence = self._statistics(packs)
        statistics = PackStatistics(
            tokens=_sum_by_pack(packs.lengths, packs.offsets),
            squared_lengths=_sum_by_pack(per_sequence.squared_lengths, packs.offsets),
            segments=_sum_by_pack(per_sequence.segments, packs.offsets),
        )
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

    def _statistics(self, packs: PackSelection) -> "_SequenceStatistics":
        sequence_sources = np.repeat(packs.sources, np.diff(packs.offsets))
        found = _SequenceStatistics(
            **{name: np.empty(len(packs.sequence_ids), dtype=np.int64) for name in _SequenceStatistics._fields}
        )
        for index, source in enumerate(self.sources):
            members = sequence_sources == index
            lengths, sequence_ids = packs.lengths[members], packs.sequence_ids[members]
            segments, squared_lengths = source.view.statistics(sequence_ids, lengths)
            found.segments[members] = segments
            found.squared_lengths[members] = squared_lengths
            padding = source.view.padding_counts(sequence_ids)
            found.padding[members] = 0 if padding is None else padding.tokens
            found.targets[members] = self.objective.count_targets(source.view, sequence_ids, lengths, segments)
        return found


class _SequenceStatistics(NamedTuple):
    """The statistics of each sequence of a step."""

    targets: Int64[np.ndarray, " M"]
    squared_lengths: Int64[np.ndarray, " M"]
    """Sum of length² over the sequence's segments."""
    segments: Int64[np.ndarray, " M"]
    padding: Int64[np.ndarray, " M"]
    """Tokens that only pad the sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackStatistics:
    """The statistics from which the cost of packs, or of any items, is computed."""

    tokens: Int64[np.ndarray, "*items"]
    squared_lengths: Int64[np.ndarray, "*items"]
    """Sum of length² over segments: the work of attention."""
    segments: Int64[np.ndarray, "*items"]


def item_costs(weights: CostWeights, statistics: PackStatistics) -> Float64[np.ndarray, "*items"]:
    """Returns the cost of each item to a rank, in the unit of the weights."""
    costs: Float64[np.ndarray, "*items"] = (
        weights.per_token * statistics.tokens + weights.per_squared_length * statistics.squared_lengths
    )
    return costs + weights.per_segment * statistics.segments if weights.per_segment else costs


def _sum_by_pack(values: Int64[np.ndarray, " M"], offsets: Int64[np.ndarray, " N_plus_1"]) -> Int64[np.ndarray, " N"]:
    cumulated = np.concatenate([[0], np.cumsum(values)])
    sums: Int64[np.ndarray, " N"] = cumulated[offsets[1:]] - cumulated[offsets[:-1]]
    return sums
