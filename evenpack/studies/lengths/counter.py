"""Counts the lengths that the readers of files find."""

from collections.abc import Callable

import numpy as np

from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.histogram import first_wrong
from evenpack.errors import DataError


class LengthCounter:
    """Counts by length, growing with the longest."""

    def __init__(self) -> None:
        self._counts = np.zeros(1, dtype=np.int64)
        self.sequences = 0
        self.tokens = 0

    def add(self, lengths: np.ndarray, place: Callable[[int], str]) -> None:
        """Counts numbers of any type; `place` describes the origin of the n-th of them.

        Raises: DataError with origin and value for the first that is not an integer from 1 to `MOST_SLOTS`.
        """
        wrong = first_wrong(lengths, least=1, most=MOST_SLOTS)
        if wrong is not None:
            index, expected = wrong
            raise DataError(f"{place(index)}: a length must be {expected}, found {lengths[index]}")
        found = np.bincount(lengths.astype(np.intp, copy=False))
        if len(found) > len(self._counts):
            self._counts = np.pad(self._counts, (0, len(found) - len(self._counts)))
        self._counts[: len(found)] += found
        self.sequences += len(lengths)
        self.tokens += int(lengths.sum())

    def histogram(self, origin: str) -> LengthHistogram:
        """Returns the histogram of all counted lengths. Raises: DataError if there is none."""
        if not self.sequences:
            raise DataError(f"{origin} holds no sequence: the histogram is empty")
        return LengthHistogram(counts=self._counts[1:])
