"""Distances between two length histograms as distributions: numbers in [0, 1], 0 for equal distributions."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.data.packing import LengthHistogram


@dataclass(frozen=True, kw_only=True)
class HistogramDistance:
    """The distance of lengths to another histogram."""

    origin: str
    """Origin of the other histogram."""
    sequences: int
    """Sequences of the other histogram, as are the next two."""
    mean_length: float
    longest: int
    total_variation: float
    largest_cdf_gap: float


def histogram_distance(histogram: LengthHistogram, other: LengthHistogram, *, origin: str) -> HistogramDistance:
    """Returns both distances of `histogram` to `other`, which comes from `origin`."""
    return HistogramDistance(
        origin=origin,
        sequences=other.sequences,
        mean_length=other.tokens / other.sequences,
        longest=other.longest,
        total_variation=total_variation(histogram, other),
        largest_cdf_gap=largest_cdf_gap(histogram, other),
    )


def total_variation(first: LengthHistogram, second: LengthHistogram) -> float:
    """Half the sum of the absolute differences: the fraction of sequences that would have to change length."""
    differences = _differences(first, second)
    return float(np.abs(differences).sum() / 2)


def largest_cdf_gap(first: LengthHistogram, second: LengthHistogram) -> float:
    """The greatest difference of the cumulative distributions (Kolmogorov and Smirnov's distance)."""
    differences = _differences(first, second)
    return float(np.abs(np.cumsum(differences)).max())


def _differences(first: LengthHistogram, second: LengthHistogram) -> Float64[np.ndarray, " lengths"]:
    """Returns the differences of the fractions of each length, with the shorter histogram extended by zeros."""
    differences = np.zeros(max(len(first.counts), len(second.counts)))
    differences[: len(first.counts)] += first.counts / first.sequences
    differences[: len(second.counts)] -= second.counts / second.sequences
    return differences
