"""Lengths, part by part, become a histogram."""

from collections.abc import Callable

import numpy as np

from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError

LONGEST = 1 << 24
"""As long as a pack can be; guards the memory of a histogram against a stray number."""


class LengthCounter:
    """Counts by length, growing with the longest."""

    def __init__(self) -> None:
        self._counts = np.zeros(1, dtype=np.int64)
        self.sequences = 0
        self.tokens = 0

    def add(self, lengths: np.ndarray, place: Callable[[int], str]) -> None:
        """Counts numbers of any type; `place` tells where the n-th of them comes from.

        Raises: DataError with place and value for the first that is not whole and from 1 to `LONGEST`.
        """
        in_range = (lengths >= 1) & (lengths <= LONGEST)  # False for NaN too
        right = in_range if lengths.dtype.kind != "f" else in_range & (lengths == np.floor(lengths))
        if not right.all():
            index = int(np.argmin(right))
            expected = f"in the range from 1 to {LONGEST}" if not in_range[index] else "a whole number"
            raise DataError(f"{place(index)}: a length must be {expected}, found {lengths[index]}")
        found = np.bincount(lengths.astype(np.intp, copy=False))
        self._counts = np.pad(self._counts, (0, max(0, len(found) - len(self._counts))))
        self._counts[: len(found)] += found
        self.sequences += len(lengths)
        self.tokens += int(lengths.sum())

    def histogram(self, origin: str) -> LengthHistogram:
        """Of all that was counted. Raises: DataError if that is nothing."""
        if not self.sequences:
            raise DataError(f"{origin} holds no sequence: the histogram is empty")
        return LengthHistogram(counts=self._counts[1:])
