"""Different micro-batches, for a cost model."""

from collections.abc import Iterator

import numpy as np

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.selection import select_packs
from evenpack.step_counts import StepCounts

_POOL = 2048
"""Sequences to choose from; 16 times a micro-batch if that is more."""

_SIZES = 4
"""Sizes: a quarter, half and three quarters of a micro-batch, and a whole one."""

_GOLDEN = 0.5 * (5**0.5 - 1)
_NO_COUNTS = StepCounts(packs=0, sequences=0, tokens=0, targets=0)


def sample_micro_batches(singles: MicroBatchDataset, count: int) -> Iterator[PackedBatch]:
    """Yields un-padded micro-batches of single sequences of nearly one length each, the same ones each time.

    They go from the shortest to the longest and have different numbers of sequences, so that slots and squared lengths
    vary independently.

    Args:
        singles: over packs of one sequence.
    """
    rows = singles.settings.shape.items_per_micro_batch
    sizes = sorted({max(1, round(rows * part / _SIZES)) for part in range(1, _SIZES + 1)})
    pool = select_packs(singles.planner.sources, *singles.planner.mixture.draws(0, max(_POOL, 16 * rows)))
    by_length = np.argsort(pool.lengths, kind="stable")
    for number in range(count):
        size = sizes[number % len(sizes)]
        place = (number * _GOLDEN) % 1.0  # spreads evenly, whatever the count
        first = round(place * (len(by_length) - size))
        yield singles.collator.collate(pool.take(by_length[first : first + size]), _NO_COUNTS)
