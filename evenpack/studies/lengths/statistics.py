"""Statistics of a histogram of lengths, and the cost of padding it."""

from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, kw_only=True)
class LengthRange:
    """A bar of a histogram."""

    shortest: int
    longest: int
    sequences: int
    tokens: int


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
        shortest=int(np.flatnonzero(histogram.counts)[0]) + 1,
        mean=histogram.tokens / histogram.sequences,
        median=percentile(0.5),
        percentile_90=percentile(0.9),
        percentile_99=percentile(0.99),
        longest=histogram.longest,
        padding_share=1 - histogram.tokens / slots,
        speed_up_limit=slots / histogram.tokens,
    )


def length_ranges(histogram: LengthHistogram, *, bars: int = 16) -> tuple[LengthRange, ...]:
    """Returns the histogram in at most `bars` ranges of equal width, empty ones included."""
    width = -(-histogram.longest // bars)
    counts = histogram.counts[: histogram.longest]
    lengths = np.arange(1, histogram.longest + 1)
    return tuple(
        LengthRange(
            shortest=start + 1,
            longest=min(start + width, histogram.longest),
            sequences=int(counts[start : start + width].sum()),
            tokens=int(counts[start : start + width] @ lengths[start : start + width]),
        )
        for start in range(0, histogram.longest, width)
    )
