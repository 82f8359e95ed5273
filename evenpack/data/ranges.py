"""Ranges of numbers: the indices of slices that are read together, and neighbours that are processed together."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64


def ranges(starts: Int64[np.ndarray, " K"], counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " N"]:
    """Returns `counts[i]` numbers from `starts[i]` on, range after range."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def cut(offsets: Int64[np.ndarray, " _"], most: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of neighbours, first and one past the last, that take up to `most` together, or of one larger.

    `offsets` are where each of them begins, and where the last ends.
    """
    first = 0
    while first < len(offsets) - 1:
        stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + most, side="right")) - 1)
        yield first, stop
        first = stop
