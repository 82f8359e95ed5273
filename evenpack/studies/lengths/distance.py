"""How far two length histograms are from each other, as distributions: numbers in [0, 1], 0 for equal shares."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.data.packing import LengthHistogram


@dataclass(frozen=True, kw_only=True)
class HistogramDistance:
    """How far lengths are from those of another histogram."""

    origin: str
    """The other one."""
    sequences: int
    """Of the other one, as the next two."""
    mean_length: float
    longest: int
    total_variation: float
    largest_cdf_gap: float


def histogram_distance(histogram: LengthHistogram, other: LengthHistogram, *, origin: str) -> HistogramDistance:
    """Both distances of `histogram` to `other`, which comes from `origin`."""
    return HistogramDistance(
        origin=origin,
        sequences=other.sequences,
        mean_length=other.tokens / other.sequences,
        longest=other.longest,
        total_variation=total_variation(histogram, other),
        largest_cdf_gap=largest_cdf_gap(histogram, other),
    )


def total_variation(first: LengthHistogram, second: LengthHistogram) -> float:
    """Half the sum of the differences of all shares: what part of the sequences would have to change length."""
    differences = _differences(first, second)
    return float(np.abs(differences).sum() / 2)


def largest_cdf_gap(first: LengthHistogram, second: LengthHistogram) -> float:
    """The greatest difference between the shares of sequences up to a length (Kolmogorov and Smirnov's distance)."""
    differences = _differences(first, second)
    return float(np.abs(np.cumsum(differences)).max())


def _differences(first: LengthHistogram, second: LengthHistogram) -> Float64[np.ndarray, " lengths"]:
    """Of the shares of each length, the shorter histogram filled up with zeros."""
    differences = np.zeros(max(len(first.counts), len(second.counts)))
    differences[: len(first.counts)] += first.counts / first.sequences
    differences[: len(second.counts)] -= second.counts / second.sequences
    return differences
