"""The sizes of a batch's index arrays, fixed for a run, so that every micro-batch of every rank has the same shapes.

They are the largest that any micro-batch of the planned steps needs, counted from the plan without reading tokens.
Where that would take long, they are those of the fullest packs together.

Shapes: S = segments, N = sequences, M = masked tokens of a batch, K = packs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

from evenpack.data.batches.objectives import Objective
from evenpack.data.batches.placement import Placer
from evenpack.data.batches.task import beyond_capacity
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import StepShape
from evenpack.errors import ConfigError, DataError

ROW_MULTIPLE = 16
"""Multiple of rows for which matrix products on tensor cores are made, in FP8 too; M is rounded up to it."""

_MOST_ITEMS = 1 << 20
"""Packs or sequences of a run up to which all steps are counted: two to eight seconds when it starts."""
_MOST_SEQUENCES = 1 << 24
"""Sequences of a source up to which all steps are counted: its index, read at random, is 64 MB or less."""


@dataclass(frozen=True, kw_only=True)
class BatchCapacity:
    """The sizes of the index arrays of every batch."""

    segments: int
    """S: segments, those of padding included."""
    sequences: int
    targets: int
    """M: masked tokens, rounded up; 0 for an objective whose targets need no list."""
    counted_steps: int | None
    """The steps, from the first of the run, whose largest micro-batch this is; None: an upper bound for any step."""
    follows: bool
    """Whether the sizes follow each micro-batch instead, because it has no fixed number of items."""

    def require_steps(self, stop_step: int) -> None:
        """Checks that the steps before `stop_step` were counted. Raises: ConfigError if they were not."""
        if self.counted_steps is not None and stop_step > self.counted_steps:
            raise ConfigError(
                f"steps up to {stop_step} were asked for, but the sizes of the batches are those of the first "
                f"{self.counted_steps} steps: raise training.steps to {stop_step} or more, or stop earlier"
            )

    def require(self, name: Literal["segments", "sequences"], found: int) -> None:
        """Checks a number of one micro-batch. Raises: DataError if it is beyond the capacity."""
        if found > getattr(self, name):
            raise DataError(beyond_capacity(name, found, getattr(self, name)))


def placer_of(sources: Sequence[PackedSource], *, shape: StepShape, objective: Objective, pack_length: int) -> Placer:
    """Returns the placer of batches that mix these sources."""
    return Placer(
        shape=shape,
        pack_length=pack_length,
        max_sequence_length=max(source.view.max_sequence_length for source in sources),
        is_bidirectional=objective.is_bidirectional,
    )


def find_capacity(planner: StepPlanner, *, steps: int, objective: Objective, pack_length: int) -> BatchCapacity:
    """Returns the capacity of the first `steps` steps of a run: exact, or that of any batch where counting takes long.

    It is the same on every rank, and depends on the number of ranks, which decides what forms a micro-batch.
    """
    shape, sources = planner.shape, planner.sources
    placer = placer_of(sources, shape=shape, objective=objective, pack_length=pack_length)
    is_short = steps * shape.items_per_step <= _MOST_ITEMS
    if shape.policy == "max_tokens" or not is_short or max(one.plan.sequences for one in sources) > _MOST_SEQUENCES:
        return capacity_of_any_batch(sources, placer=placer, objective=objective)
    lists_targets = any(objective.most_targets(source.view) is not None for source in sources)
    segments = sequences = targets = 0
    for loads in planner.loads(range(steps)):
        of_packs = placer.segments_of(sequences=loads.sequences, segments=loads.segments, tokens=loads.tokens)
        segments = max(segments, loads.largest_share(of_packs))
        sequences = max(sequences, loads.largest_share(loads.sequences))
        if lists_targets:
            targets = max(targets, loads.largest_share(loads.targets))
    return BatchCapacity(
        segments=segments + placer.segments_after_packs,
        sequences=sequences,
        targets=_rounded(targets),
        counted_steps=steps,
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
        counted_steps=None,
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
