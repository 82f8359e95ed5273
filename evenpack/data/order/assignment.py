"""Assigns the items of a step, packs or single sequences, to ranks and their micro-batches: one function per policy.

    arrival             in order of arrival, equal counts
    sorted              sorted by length and cut into runs of equal counts, so that a micro-batch holds similar lengths
    sorted_serpentine   sorted by length and assigned back and forth over all micro-batches, one each:
                        similar sums of lengths
    cost_balanced       `balance.py`: equal counts, nearly equal cost
    max_tokens          unequal counts, nearly equal slots: arrival cut by cumulated tokens, or, for rectangles, sorted
                        and cut so that the largest rectangle (of `padded_width`) is as small as possible

The items of the step are given; a policy only decides which rank computes which. `max_tokens` corresponds to
fairseq's batches of constant token count: there the bound is fixed and the number of batches follows, here the number
is fixed and the bound follows.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.order.balance import assign_by_cost
from evenpack.data.order.step_shape import AssignmentPolicy, StepShape
from evenpack.errors import ConfigError

PADDED_WIDTH_MULTIPLE = 8
"""Multiple to which rectangles of variable width are padded, for tensor cores."""

_FITTED: tuple[AssignmentPolicy, ...] = ("sorted", "max_tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAssignment:
    """The assignment of a step: its part r * micro_batches + m is micro-batch m of rank r."""

    items: Int64[np.ndarray, " items"]
    """A permutation of the step's items."""
    offsets: Int64[np.ndarray, " parts_plus_1"]
    """Part s holds items[offsets[s]:offsets[s + 1]], and is never empty."""

    def items_of(self, number: int) -> Int64[np.ndarray, " K"]:
        """Returns the items of one part."""
        return self.items[self.offsets[number] : self.offsets[number + 1]]


def assign_step(
    shape: StepShape, lengths: Int64[np.ndarray, " items"], costs: Float64[np.ndarray, " items"], *, ranks: int
) -> StepAssignment:
    """Assigns the items of one step; the result depends on the arguments alone, on every machine.

    Args:
        lengths: real tokens of each item, 1 or more, in arrival order.
        costs: cost of each item, all in the same unit; only `cost_balanced` reads them.

    Raises: ConfigError if there are too few items, or if they cannot be divided into the equal counts that the policy
    requires; ValueError for a length below 1, or a cost that is negative or not finite.
    """
    policy, micro_batches = shape.policy, shape.micro_batches(ranks)
    parts = ranks * micro_batches
    if policy == "cost_balanced":
        assigned = assign_by_cost(
            costs, ranks=ranks, micro_batches=micro_batches, per_micro_batch=shape.balances_each_micro_batch
        )
        return _equal_parts(assigned.reshape(-1), parts)
    if len(lengths) < parts or (policy != "max_tokens" and len(lengths) % parts):
        how = "with one or more for each" if policy == "max_tokens" else "equally"
        raise ConfigError(
            f"a step of {len(lengths)} items cannot be assigned {how} to {ranks} ranks x {micro_batches} micro-batches "
            f"by {policy}; choose a step of a multiple of {parts} items"
        )
    if lengths.min() < 1:
        raise ValueError(f"item {lengths.argmin()} of a step must have 1 token or more, found {lengths.min()}")
    if policy == "arrival":
        return _equal_parts(np.arange(len(lengths)), parts)
    if policy == "max_tokens" and shape.layout != "padded":
        return StepAssignment(items=np.arange(len(lengths)), offsets=_cut_by_tokens(lengths, parts))
    order = _longest_first(lengths)
    if policy == "sorted_serpentine":
        return _serpentine(order, ranks, micro_batches)
    offsets = np.arange(parts + 1) * (len(lengths) // parts)
    if policy == "max_tokens":
        offsets = _cut_into_rectangles(_filled_up(lengths[order]), parts)
    return _assign_runs(order, offsets, ranks, micro_batches)


def padded_width(
    policy: AssignmentPolicy, longest: Int64[np.ndarray, "*parts"], max_sequence_length: int
) -> Int64[np.ndarray, "*parts"]:
    """Returns the slots of each row of a padded micro-batch whose longest sequence has `longest` tokens.

    It follows the longest sequence where similar lengths are assigned together; else it is `max_sequence_length`, as
    usual in padded training, which keeps the shape fixed.
    """
    if policy not in _FITTED:
        return np.full_like(longest, max_sequence_length)
    return np.minimum(_filled_up(longest), max_sequence_length)


def _filled_up(lengths: Int64[np.ndarray, "*items"]) -> Int64[np.ndarray, "*items"]:
    return -(-lengths // PADDED_WIDTH_MULTIPLE) * PADDED_WIDTH_MULTIPLE


def _equal_parts(items: Int64[np.ndarray, " items"], parts: int) -> StepAssignment:
    return StepAssignment(items=items, offsets=np.arange(parts + 1) * (len(items) // parts))


def _longest_first(lengths: Int64[np.ndarray, " items"]) -> Int64[np.ndarray, " items"]:
    longest = lengths.max()
    narrow = np.uint16 if longest < 1 << 16 else np.uint32  # numpy sorts 16 bits by radix
    return np.argsort((longest - lengths).astype(narrow), kind="stable")


def _back_and_forth(ranks: int, micro_batches: int) -> Int64[np.ndarray, " parts"]:
    """Returns all parts, micro-batch index by index: over the ranks upwards, then downwards, and so on."""
    rank = np.tile(np.arange(ranks), (micro_batches, 1))
    rank[1::2] = rank[1::2, ::-1].copy()
    return (rank * micro_batches + np.arange(micro_batches)[:, None]).reshape(-1)


def _serpentine(order: Int64[np.ndarray, " items"], ranks: int, micro_batches: int) -> StepAssignment:
    layers = order.reshape(-1, ranks * micro_batches).copy()
    layers[1::2] = layers[1::2, ::-1].copy()
    by_part = np.empty_like(layers)
    by_part[:, _back_and_forth(ranks, micro_batches)] = layers
    return _equal_parts(np.ascontiguousarray(by_part.T).reshape(-1), ranks * micro_batches)


def _assign_runs(
    order: Int64[np.ndarray, " items"], cuts: Int64[np.ndarray, " parts_plus_1"], ranks: int, micro_batches: int
) -> StepAssignment:
    """Gives each part a run of `order`: ranks get neighbouring runs in each micro-batch, the longest in the first."""
    if micro_batches == 1:
        return StepAssignment(items=order, offsets=cuts)
    run_of_part = np.argsort(_back_and_forth(ranks, micro_batches))
    sizes = np.diff(cuts)[run_of_part]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    places = np.repeat(cuts[run_of_part] - offsets[:-1], sizes) + np.arange(len(order))
    return StepAssignment(items=order[places], offsets=offsets)


def _cut_by_tokens(lengths: Int64[np.ndarray, " items"], parts: int) -> Int64[np.ndarray, " parts_plus_1"]:
    """Cuts at the positions nearest to equal token counts, at least one item in each part."""
    ends = np.cumsum(lengths)
    wanted = np.arange(1, parts) * int(ends[-1]) // parts
    after = np.searchsorted(ends, wanted)  # the item that crosses the target
    cuts = after + (2 * wanted >= 2 * ends[after] - lengths[after])
    numbers = np.arange(1, parts)
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - numbers) + numbers
    cuts = np.minimum(cuts, len(lengths) - parts + numbers)
    return np.concatenate([[0], cuts, [len(lengths)]])


def _cut_into_rectangles(falling: Int64[np.ndarray, " items"], parts: int) -> Int64[np.ndarray, " parts_plus_1"]:
    """Cuts falling widths into runs so that the largest count * width is as small as any cut makes it.

    Runs that are as long as a bound allows are the fewest possible, so the smallest bound is found by bisection.
    """
    count = -(-len(falling) // parts)
    least = max(int(falling[0]), -(-int(falling.sum()) // parts))
    enough = int(falling[0]) * count
    starts_within = _fullest_runs(falling)
    bound = least + bisect_left(range(least, enough), -parts, key=lambda bound: -len(starts_within(bound)))
    cuts = np.array([*starts_within(bound), len(falling)], dtype=np.int64)
    while len(cuts) <= parts:
        cuts = _halve_largest(falling, cuts, parts + 1 - len(cuts))
    return cuts


def _fullest_runs(falling: Int64[np.ndarray, " items"]) -> Callable[[int], list[int]]:
    """Returns a function from a bound of count * longest to the starts of runs that are as long as it allows.

    It processes all runs that start in one length together: a step may have thousands of runs, but few lengths.
    """
    items = len(falling)
    length_at = np.ascontiguousarray(falling).data  # read faster than the array
    longer_or_equal = (items - np.cumsum(np.bincount(falling)) + np.bincount(falling)).tolist()

    def starts_within(bound: int) -> list[int]:
        starts: list[int] = []
        place = 0
        while place < items:
            length = length_at[place]
            run = bound // length
            end = place + -(-(longer_or_equal[length] - place) // run) * run
            starts.extend(range(place, end if end < items else items, run))
            place = end
        return starts

    return starts_within


def _halve_largest(
    falling: Int64[np.ndarray, " items"], cuts: Int64[np.ndarray, " cuts"], more: int
) -> Int64[np.ndarray, " more_cuts"]:
    """Cuts up to `more` runs of two or more items in halves, those with the largest rectangles."""
    counts = np.diff(cuts)
    sizes = np.where(counts > 1, counts * falling[cuts[:-1]], 0)
    chosen = np.argsort(-sizes, kind="stable")[: min(more, np.count_nonzero(sizes))]
    return np.sort(np.concatenate([cuts, cuts[chosen] + counts[chosen] // 2]))
