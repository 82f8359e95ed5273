"""Statistics of a histogram of lengths, the cost of padding it, and its distance from another."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.data.packing import LengthHistogram


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Statistics of the sequences of a histogram; lengths in tokens."""

    sequences: int
    tokens: int
    shortest: int
    mean: float
    median: int
    percentile_90: int
    percentile_99: int
    longest: int
    padding_share: float
    """Fraction of slots wasted when every sequence is padded to `pack_length`."""
    speed_up_limit: float
    """Slots of padded training over real tokens: the speed-up of packing without any padding."""


def length_statistics(histogram: LengthHistogram, *, pack_length: int) -> LengthStatistics:
    """Describes a histogram; `pack_length` is the width of padded rows."""
    cumulated = np.cumsum(histogram.counts)

    def percentile(share: float) -> int:
        """Returns the shortest length that at least this fraction of all sequences does not exceed."""
        return int(np.searchsorted(cumulated, share * cumulated[-1])) + 1

    slots = histogram.sequences * pack_length
    return LengthStatistics(
        sequences=histogram.sequences,
        tokens=histogram.tokens,
        shortest=histogram.shortest,
        mean=histogram.tokens / histogram.sequences,
        median=percentile(0.5),
        percentile_90=percentile(0.9),
        percentile_99=percentile(0.99),
        longest=histogram.longest,
        padding_share=1 - histogram.tokens / slots,
        speed_up_limit=slots / histogram.tokens,
    )


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
