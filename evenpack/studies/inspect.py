"""What a histogram of lengths means for padding and packing: figures without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from evenpack.data.packing import LengthHistogram, pack

DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, None)
"""Most sequences a pack may hold; None: no limit."""
_GREEDY = ("shortest_pack_first", "longest_pack_first")
_LONGEST_CUT_AT_EVERY_DEPTH = 512
"""Slots up to which cutting_stock takes about a second at any depth; longer packs show it without a limit only."""


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Of the sequences of a histogram; lengths in tokens."""

    sequences: int
    tokens: int
    shortest: int
    mean: float
    median: int
    percentile_90: int
    percentile_99: int
    longest: int
    padding_share: float
    """Share of slots wasted when every sequence is padded to `pack_length`."""
    speed_up_limit: float
    """Slots of padded training over real tokens: what packing without any padding would gain."""


@dataclass(frozen=True, kw_only=True)
class PackingRow:
    """One algorithm at one limit of depth."""

    algorithm: str
    depth_limit: int | None
    """Most sequences a pack may hold; None: no limit."""
    depth: int
    """Sequences of the fullest pack."""
    strategies: int
    packs: int
    efficiency: float
    """Share of slots that hold a token."""
    padding_share: float
    packing_factor: float
    """Sequences a pack, on average."""
    lower_bound: int
    """Packs that no packing at this limit of depth can do without, as far as is proven."""
    gap: float
    """Packs above the lower bound, as a share of it."""
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class LengthRange:
    """A bar of a histogram."""

    shortest: int
    longest: int
    sequences: int
    tokens: int


def length_statistics(histogram: LengthHistogram, *, pack_length: int) -> LengthStatistics:
    """Describes a histogram; `pack_length` is what padding would fill up to."""
    cumulated = np.cumsum(histogram.counts)

    def percentile(share: float) -> int:
        """The shortest length that at least `share` of all sequences do not exceed."""
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


def compare_packings(
    histogram: LengthHistogram, *, pack_length: int, depths: Sequence[int | None] = DEPTHS
) -> tuple[PackingRow, ...]:
    """The greedy algorithms and cutting_stock at every limit of depth; a pack of one sequence needs no algorithm.

    Raises: PackingError if a sequence is longer than `pack_length`.
    """
    rows = [packing_row(histogram, "none", None, pack_length)] if 1 in depths else []
    for depth in depths:
        if depth == 1:
            continue
        exact = ("cutting_stock",) if depth is None or pack_length <= _LONGEST_CUT_AT_EVERY_DEPTH else ()
        rows += with_best_bound(
            [packing_row(histogram, algorithm, depth, pack_length) for algorithm in (*_GREEDY, *exact)]
        )
    return tuple(rows)


def length_ranges(histogram: LengthHistogram, *, bars: int = 16) -> tuple[LengthRange, ...]:
    """The histogram in at most `bars` ranges of equal width, empty ones included."""
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


def with_best_bound(rows: Sequence[PackingRow]) -> list[PackingRow]:
    """Rows of one limit of depth, each held against the greatest bound that any of them proves."""
    bound = max(row.lower_bound for row in rows)
    return [replace(row, lower_bound=bound, gap=row.packs / bound - 1) for row in rows]


def packing_row(histogram: LengthHistogram, algorithm: str, depth: int | None, pack_length: int) -> PackingRow:
    """Packs, and says what came of it. Raises: PackingError as `pack`."""
    packing = pack(histogram, algorithm, pack_length=pack_length, max_sequences_per_pack=depth)
    return PackingRow(
        algorithm=algorithm,
        depth_limit=1 if algorithm == "none" else depth,
        depth=packing.depth,
        strategies=len(packing.strategies),
        packs=packing.packs,
        efficiency=packing.efficiency,
        padding_share=1 - packing.efficiency,
        packing_factor=packing.packing_factor,
        lower_bound=packing.lower_bound,
        gap=packing.gap,
        cpu_seconds=packing.cpu_seconds,
    )
