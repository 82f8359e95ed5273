"""Makes packings of given strategies, for tests of packers."""

from collections.abc import Sequence

import numpy as np

from evenpack.data.packing import LengthHistogram, Packing, Strategy


def packing_of(
    strategies: Sequence[Strategy], counts: Sequence[int], histogram: LengthHistogram, pack_length: int
) -> Packing:
    """Returns the packing. Raises: PackingError, as every `Packing`, unless each sequence has one place in it."""
    return Packing(
        algorithm="tested",
        pack_length=pack_length,
        histogram=histogram,
        strategies=tuple(strategies),
        counts=np.array(counts),
        cpu_seconds=0.0,
    )
