"""The sizes of a batch's index arrays, which are the same for every micro-batch of every rank and rarely change.

They are the largest that any micro-batch of many steps needs, counted from the plan without reading tokens: first for
the steps with which the run begins, and again before these are over. So they only grow, a few times in a long run. A
kernel over segments starts blocks for each segment that there is room for, whether it is real or empty.

Shapes: S = segments, N = sequences, M = masked tokens of a batch, K = packs.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Int64

from evenpack.data.batches.objectives import BatchSizes, Objective, beyond_capacity, rounded_size
from evenpack.data.batches.placement import Placer
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import StepShape
from evenpack.errors import DataError

ROW_MULTIPLE = 16
"""Multiple of rows for which matrix products on tensor cores are made, in FP8 too; M is rounded up to it."""

_ITEMS_AT_ONCE = 1 << 20
"""Packs or sequences that are counted together, which takes two to eight seconds."""
_LARGE_SOURCE = 1 << 24
"""Sequences above which a source's index, read at random, may not be in memory."""
_ITEMS_AT_ONCE_OF_LARGE = 1 << 16
"""Packs or sequences that are then counted together, because each may take a read from the disk."""
_FARTHEST = 64
"""Up to this many ranges of steps are counted although none of their micro-batches is asked for. A loader process gets
only some of the steps, and must find the same sizes as one that gets them all."""


@dataclass(frozen=True, kw_only=True)
class BatchCapacity:
    """The sizes of the index arrays of every batch."""

    segments: int
    """S: segments, including segments of padding."""
    sequences: int
    targets: int
    """M: masked tokens, rounded up; 0 for an objective whose targets need no list."""
    counted: range | None
    """Steps that were counted last, numbered from 0: no micro-batch of theirs is larger than the sizes. None: the sizes
    bound the micro-batches of all steps.

    In JSON the first step, and the last one plus 1."""
    follows: bool
    """Whether each batch has sizes of its own instead, rounded up from its contents: under `max_tokens`, in a Loader
    and in fine-tuning."""

    @classmethod
    def of_each_batch(cls) -> "BatchCapacity":
        """Returns the capacity of batches whose sizes all follow their items, among them the rows of packs."""
        return cls(segments=0, sequences=0, targets=0, counted=None, follows=True)

    def grown_to(self, other: "BatchCapacity") -> "BatchCapacity":
        """Returns the greater of each size, for the steps that `other` has counted."""
        sizes = {name: max(getattr(self, name), getattr(other, name)) for name in ("segments", "sequences", "targets")}
        return replace(other, **sizes)

    def sizes(self, *, sequences: int, segments: int) -> BatchSizes:
        """Returns the sizes for one micro-batch. Raises: DataError if it is beyond the capacity."""
        if self.follows:
            return BatchSizes(sequences=rounded_size(sequences), segments=rounded_size(segments), targets=None)
        for name, found, most in (("sequences", sequences, self.sequences), ("segments", segments, self.segments)):
            if found > most:
                raise DataError(beyond_capacity(name, found, most))
        return BatchSizes(sequences=self.sequences, segments=self.segments, targets=self.targets)


class CapacityAhead:
    """The capacity at each step of a run, counted for many steps ahead. It never shrinks on the way to later steps.

    It is the same on every rank that has begun at the same step, and depends on the number of ranks, which decides what
    forms a micro-batch. Whoever asks for one step after another waits once: what comes next is counted in a thread.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        planned_steps: int,
        objective: Objective,
        pack_length: int,
        start_step: int = 0,
        known: BatchCapacity | None = None,
    ) -> None:
        """Counts the steps around `start_step`, unless their capacity is `known`.

        Args:
            planned_steps: beyond them nothing is counted until it is asked for.
        """
        self._planned_steps = planned_steps
        self._count = partial(count_capacity, planner, objective=objective, pack_length=pack_length)
        is_large = max(source.plan.sequences for source in planner.sources) > _LARGE_SOURCE
        items = _ITEMS_AT_ONCE_OF_LARGE if is_large else _ITEMS_AT_ONCE
        self._at_once = max(1, items // planner.shape.items_per_step)
        self._next: tuple[range, Future[BatchCapacity]] | None = None
        self.now = known or self._count(self._around(start_step))
        """The capacity of the last step that was passed to `at`."""

    def at(self, step: int) -> BatchCapacity:
        """Returns the capacity of a step, numbered from 0."""
        counted = self.now.counted
        if counted is None:
            return self.now
        is_far = not 0 <= step - counted.start < _FARTHEST * self._at_once
        while step not in counted:  # one of several loaders may get no item of the steps in between
            counted = self._around(step if is_far else counted.stop)
            ahead, self._next = self._next, None
            found = ahead[1].result() if ahead is not None and ahead[0] == counted else self._count(counted)
            self.now = self.now.grown_to(found)
        if self._next is None and counted.stop < self._planned_steps and step >= (counted.start + counted.stop) // 2:
            following = self._around(counted.stop)
            self._next = following, _in_background(partial(self._count, following))
        return self.now

    def _around(self, step: int) -> range:
        """Returns the steps that are counted together with this one: the same for every start of the run."""
        start = step - step % self._at_once
        stop = start + self._at_once
        if start < self._planned_steps < stop:
            return range(start, self._planned_steps) if step < self._planned_steps else range(self._planned_steps, stop)
        return range(start, stop)


def _in_background(function: Callable[[], BatchCapacity]) -> "Future[BatchCapacity]":
    """Calls a function in a thread for which the end of the process does not wait."""
    future: Future[BatchCapacity] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="capacity of the next steps", daemon=True).start()
    return future


def count_capacity(planner: StepPlanner, steps: range, *, objective: Objective, pack_length: int) -> BatchCapacity:
    """Returns what the largest micro-batch of these steps needs; where sizes follow the batch, a bound for any."""
    shape, sources = planner.shape, planner.sources
    placer = Placer.of(sources, shape=shape, pack_length=pack_length, is_bidirectional=objective.is_bidirectional)
    if shape.policy == "max_tokens":
        return capacity_of_any_batch(sources, placer=placer, objective=objective)
    lists_targets = any(objective.most_targets(source.view) is not None for source in sources)
    segments = sequences = targets = 0
    for loads in planner.loads(steps):
        of_packs = placer.segments_of(sequences=loads.sequences, segments=loads.segments, tokens=loads.tokens)
        segments = max(segments, loads.largest_share(of_packs))
        sequences = max(sequences, loads.largest_share(loads.sequences))
        if lists_targets:
            targets = max(targets, loads.largest_share(loads.targets))
    return BatchCapacity(
        segments=segments + placer.segments_after_packs,
        sequences=sequences,
        targets=_rounded(targets),
        counted=steps,
        follows=False,
    )


def capacity_of_any_batch(sources: Sequence[PackedSource], *, placer: Placer, objective: Objective) -> BatchCapacity:
    """Returns an upper bound: the fullest packs of all sources in one micro-batch."""

    def sequences_of(source: PackedSource) -> Int64[np.ndarray, " lengths"]:
        return np.ones(1 + source.view.max_sequence_length, dtype=np.int64)

    sequences = _largest_batch(sources, placer.shape, sequences_of)
    segments = _largest_batch(
        sources, placer.shape, lambda source: sequences_of(source) * source.view.max_segments_per_sequence
    )
    targets = _largest_batch(sources, placer.shape, lambda source: objective.most_targets(source.view))
    return BatchCapacity(
        segments=segments + placer.max_padding_segments(sequences),
        sequences=sequences,
        targets=_rounded(targets),
        counted=None,
        follows=placer.shape.policy == "max_tokens",
    )


def _largest_batch(
    sources: Sequence[PackedSource],
    shape: StepShape,
    values_of: Callable[[PackedSource], Int64[np.ndarray, " lengths"] | None],
) -> int:
    """Returns the sum of the greatest packs that one micro-batch may hold; 0 if there are no values.

    A step that begins in one epoch and ends in another may hold a pack twice.
    """
    packs = shape.items_per_micro_batch
    greatest = []
    for source in sources:
        values = values_of(source)
        if values is None:
            return 0
        epochs = -(-max(shape.items_per_step, packs) // source.plan.packs) + 1
        greatest.append(np.repeat(source.plan.largest_sums(values, packs), epochs))
    return int(np.sort(np.concatenate(greatest))[::-1][:packs].sum())


def _rounded(targets: int) -> int:
    return -(-targets // ROW_MULTIPLE) * ROW_MULTIPLE
