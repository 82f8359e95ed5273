"""Ranges of numbers, as the indices of slices that are read together."""

import numpy as np
from jaxtyping import Int64


def ranges(starts: Int64[np.ndarray, " K"], counts: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " N"]:
    """Returns `counts[i]` numbers from `starts[i]` on, range after range."""
    before = np.cumsum(counts) - counts
    numbers: Int64[np.ndarray, " N"] = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return numbers
