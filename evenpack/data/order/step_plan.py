"""The packs of step t and their assignment to ranks: a pure function, the same on every rank.

If a run counts single sequences, each of them is a pack of one.

The packs depend on (seed, step) and the prepared data alone. World size, accumulation and balancing only change
`assignment`: which rank computes which packs of the step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, Real

from evenpack.data.order.assignment import StepAssignment, assign_step
from evenpack.data.order.selection import PackedSource, PackSelection, select_packs
from evenpack.data.order.stages import Numbering, Stage, StagedOrder
from evenpack.data.order.step_shape import CostWeights, StepShape
from evenpack.data.sequences import SequenceCounts, SequenceView
from evenpack.losses import StepCounts
from evenpack.visible_pairs import visible_pairs


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All packs of one step, and their assignment."""

    step: int
    packs: PackSelection
    counts: StepCounts
    assignment: StepAssignment
    """Assignment of indices into `packs`."""
    costs: Float64[np.ndarray, " packs"]
    """Cost of each pack to its rank, in the unit of the shape's weights."""
    micro_batches: int
    """Micro-batches of each rank."""

    def cost(self, rank: int) -> float:
        """Returns the cost of all that `rank` computes."""
        first = rank * self.micro_batches
        start, stop = self.assignment.offsets[[first, first + self.micro_batches]]
        return float(self.costs[self.assignment.items[start:stop]].sum())

    def cost_of(self, rank: int, index: int) -> float:
        """Returns the cost of what `rank` computes as its micro-batch `index`."""
        return float(self.costs[self.assignment.items_of(rank * self.micro_batches + index)].sum())

    def micro_batch(self, rank: int, index: int) -> PackSelection:
        """Returns the packs that `rank` computes as its micro-batch `index`."""
        return self.packs.take(self.assignment.items_of(rank * self.micro_batches + index))


@runtime_checkable
class TargetCounter(Protocol):
    """The part of an objective (`objectives.py`) that a plan needs."""

    def count_targets(
        self, view: SequenceView, sequence_ids: Int64[np.ndarray, " K"], counts: SequenceCounts
    ) -> Int64[np.ndarray, " K"]:
        """Returns the targets of these sequences of the view, whose counts are given. Reads no token."""


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
        stages: Sequence[Stage] = (),
    ) -> None:
        """Takes the `weights` of the sources and the `shape` of steps; of a run with `stages` these have both.

        Raises: ConfigError if these ranks cannot divide a step.
        """
        self.objective = objective
        self.sources = tuple(sources)
        first = Stage(
            step=0,
            weights=tuple(weights),
            items_per_step=shape.items_per_step,
            items_per_micro_batch=shape.items_per_micro_batch,
        )
        self.order = StagedOrder(stages or [first])
        self.shapes = [stage.shaped(shape) for stage in self.order.stages]
        """The shape of the steps of each stage."""
        self.ranks = ranks
        starts = [stage.step for stage in self.order.stages]
        self.micro_batches = Numbering(starts, [one.micro_batches(ranks) for one in self.shapes])
        """The micro-batches of each rank, through all steps."""

    def plan(self, step: int) -> StepPlan:
        """Plans the step (counted from 0) over all ranks. Reads lengths, never tokens."""
        packs = select_packs(self.sources, *self.order.draws(step))
        shape = self.shapes[self.order.index_at(step)]
        held, targets = self._counts(packs)
        statistics = _by_pack(packs, held, shape.cost_weights.per_pair_within)
        counts = StepCounts(
            packs=packs.packs,
            sequences=len(packs.sequence_ids),
            tokens=int(statistics.tokens.sum()) - held.padding_tokens,
            targets=targets,
            padding_targets=held.padding_targets,
        )
        costs = item_costs(shape.cost_weights, statistics)
        assignment = assign_step(shape, statistics.tokens, costs, ranks=self.ranks)
        return StepPlan(
            step=step,
            packs=packs,
            counts=counts,
            assignment=assignment,
            costs=costs,
            micro_batches=self.micro_batches.size(step),
        )

    def _counts(self, packs: PackSelection) -> tuple[SequenceCounts, int]:
        """Returns what the sequences of the packs hold, and the number of the objective's targets."""
        parts, targets = {}, 0
        for index, members in packs.members_of(len(self.sources)):
            view, sequence_ids = self.sources[index].view, packs.sequence_ids[members]
            parts[index] = view.counts(sequence_ids, packs.lengths[members])
            targets += int(self.objective.count_targets(view, sequence_ids, parts[index]).sum())
        return SequenceCounts.joined(packs.sequence_sources, parts), targets


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


def _by_pack(packs: PackSelection, held: SequenceCounts, windows: Iterable[int]) -> PackStatistics:
    ends = np.concatenate([[0], np.cumsum(held.segments)])[packs.offsets]
    return PackStatistics(
        tokens=_sums(packs.lengths, packs.offsets),
        squared_lengths=_sums(held.segment_lengths**2, ends),
        segments=np.diff(ends),
        pairs_within={
            window: _sums(visible_pairs(held.segment_lengths, window=window, causal=False), ends) for window in windows
        },
    )


def _sums(values: Int64[np.ndarray, " M"], offsets: Int64[np.ndarray, " N_plus_1"]) -> Int64[np.ndarray, " N"]:
    """Returns the sums of the values between each two offsets."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[offsets])
