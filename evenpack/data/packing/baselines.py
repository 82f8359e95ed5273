"""The baselines of packing: none, next fit in arrival order, first fit decreasing, and batches sorted by length."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.mapped_pages import memory_bytes
from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy
from evenpack.errors import PackingError

_BLOCK = 1 << 20
"""Sequences processed together; keeps the temporaries of next fit at some tens of MB, however many there are."""

_MOST_SAMPLED_FROM = 10**9
"""Population from which numpy's hypergeometric distribution cannot draw."""

_BYTES_PER_SEQUENCE = 20
"""Peak memory of next fit: the increase per sequence, for 1.6 to 6.5 million sequences of Wikipedia."""


def unpacked(histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int) -> Mapping[Strategy, int]:
    """Gives each sequence a pack of its own, whatever the limits: padding, with which all else is compared."""
    return {(index + 1,): int(histogram.counts[index]) for index in np.flatnonzero(histogram.counts).tolist()}


def next_fit(
    histogram: LengthHistogram,
    pack_length: int,
    max_sequences_per_pack: int,
    *,
    seed: int = 0,
    separators: int = 0,
) -> Mapping[Strategy, int]:
    """Packs sequences greedily in random order, as T5 does: one that does not fit closes the pack and opens the next.

    `seed` decides the order. `separators` are the tokens between two neighbours of a pack, so that `n` sequences
    take the sum of their lengths and `separators * (n - 1)` slots; the strategies contain only the lengths. No sequence
    is too long for them: a sequence alone in its pack needs none.

    Random packs have many strategies: 1.4 million for 16.3 million sequences of Wikipedia at 512 slots.

    Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), appendix H.

    Raises: PackingError for a negative seed, a number of separators that is not 0, 1 or 2, or more sequences than this
        machine has memory for.
    """
    if separators not in (0, 1, 2):
        raise PackingError(f"separators between two sequences must be 0, 1 or 2, found {separators}")
    if seed < 0:
        raise PackingError(f"a seed is 0 or more, found {seed}")
    _refuse_too_many(histogram.sequences)
    lengths = _arrivals(histogram, seed)
    depths = []
    for start, ends in next_fit_ends(lengths, pack_length, max_sequences_per_pack, separators):
        block = lengths[start : start + int(ends[-1])]
        depths.append(np.diff(ends, prepend=0).astype(np.min_scalar_type(pack_length)))
        pack = np.repeat(np.arange(len(ends)), depths[-1])
        base = histogram.longest + 1
        block[:] = base - 1 - np.sort(pack * base + (base - 1 - block.astype(np.int64))) % base
    return _counted(lengths, np.concatenate(depths), histogram.longest)


def first_fit_decreasing(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Mapping[Strategy, int]:
    """Puts each sequence, from the longest down, into the first-opened pack in which it fits.

    The packs are the same as in a search over single sequences. They are kept in the order of opening, with
    neighbours of the same lengths as one run: sequences of one length fill the runs from the front, each pack as far as
    possible, so that at most one run is divided for each length.
    """
    runs: list[tuple[Strategy, int, int]] = []  # lengths, room and number of open packs, in the order of opening
    used: Counter[Strategy] = Counter()
    for index in np.flatnonzero(histogram.counts)[::-1].tolist():
        length, waiting = index + 1, int(histogram.counts[index])
        # Packs that are not opened yet are a last run of empty ones.
        offered, runs = [*runs, ((), pack_length, waiting)], []
        for strategy, room, packs in offered:
            repeats = min(room // length, max_sequences_per_pack - len(strategy), waiting)
            if not repeats:
                runs.append((strategy, room, packs))
                continue
            filled = min(packs, waiting // repeats)
            rest = waiting - filled * repeats if filled < packs else 0  # for one partly filled pack
            waiting -= filled * repeats + rest
            for more, number in ((repeats, filled), (rest, min(rest, 1)), (0, packs - filled - min(rest, 1))):
                run = (strategy + (length,) * more, room - more * length, number)
                if number:
                    runs.append(run)
        still_open = []
        for strategy, room, packs in runs:
            if strategy and room and len(strategy) < max_sequences_per_pack:
                still_open.append((strategy, room, packs))
            elif strategy:
                used[strategy] += packs
        runs = still_open
    for strategy, _, packs in runs:
        used[strategy] += packs
    return used


def sample_histogram(histogram: LengthHistogram, sequences: int, *, seed: int) -> LengthHistogram:
    """Returns the histogram of `sequences` that are drawn without replacement.

    Raises: PackingError if there are fewer sequences, if none is requested, or more than a hundredth of 10^9 or more.
    """
    if not 1 <= sequences <= histogram.sequences:
        raise PackingError(f"a sample must have 1 to {histogram.sequences} sequences, found {sequences}")
    generator = np.random.default_rng(seed)
    if histogram.sequences >= _MOST_SAMPLED_FROM:
        if sequences > histogram.sequences // 100:
            raise PackingError(
                f"of {histogram.sequences} sequences a hundredth can be drawn at most, found {sequences}"
            )
        places = generator.choice(histogram.sequences, sequences, replace=False, shuffle=False)
        indices = np.searchsorted(np.cumsum(histogram.counts), places, side="right")
        return LengthHistogram(counts=np.bincount(indices).astype(np.int64))
    drawn = generator.multivariate_hypergeometric(histogram.counts, sequences, method="marginals")
    return LengthHistogram(counts=np.asarray(drawn, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class SortedBatches:
    """The padding of batches that each hold sequences of about the same length, one a row."""

    batch_size: int
    sequences: int
    tokens: int
    slots: int
    """Slots of all batches: the rows of each times its longest sequence."""

    @property
    def efficiency(self) -> float:
        """Fraction of slots that hold a token."""
        return self.tokens / self.slots


def sorted_batches(histogram: LengthHistogram, batch_size: int) -> SortedBatches:
    """Sorts all sequences, the shortest first, and cuts them into batches that are padded to their longest.

    The last batch, which has the longest sequences, may be smaller. Neither the order of equal lengths nor that of the
    batches changes the padding.

    Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), SORT in appendix C.

    Raises: PackingError for a batch size below 1.
    """
    if batch_size < 1:
        raise PackingError(f"batch_size must be 1 sequence or more, found {batch_size}")
    full = np.diff(np.cumsum(histogram.counts) // batch_size, prepend=0)  # batches whose last row has this length
    left = histogram.sequences % batch_size
    padded = int(full @ np.arange(1, len(full) + 1))
    return SortedBatches(
        batch_size=batch_size,
        sequences=histogram.sequences,
        tokens=histogram.tokens,
        slots=padded * batch_size + left * histogram.longest,
    )


def _refuse_too_many(sequences: int) -> None:
    """Checks the memory: next fit processes single sequences, where the other algorithms process lengths."""
    memory = memory_bytes()
    if sequences * _BYTES_PER_SEQUENCE > memory:
        raise PackingError(
            f"next_fit processes the sequences one by one: {sequences:,} of them take about "
            f"{sequences * _BYTES_PER_SEQUENCE / 1e9:,.1f} GB of memory and {memory / 1e9:,.1f} GB may be had here, "
            f"which {memory // _BYTES_PER_SEQUENCE:,} sequences would fit into; draw a sample (`evenpack study packing "
            "--sample`), or take first_fit_decreasing or longest_pack_first, which need the histogram alone"
        )


def _arrivals(histogram: LengthHistogram, seed: int) -> Integer[np.ndarray, " sequences"]:
    """Returns the length of each sequence, shuffled, in the smallest type that holds them."""
    occurring = np.arange(1, len(histogram.counts) + 1, dtype=np.min_scalar_type(len(histogram.counts)))
    lengths: Integer[np.ndarray, " sequences"] = np.repeat(occurring, histogram.counts)
    np.random.default_rng(seed).shuffle(lengths)
    return lengths


def next_fit_ends(
    lengths: Integer[np.ndarray, " sequences"], pack_length: int, max_sequences_per_pack: int, separators: int
) -> Iterator[tuple[int, Int64[np.ndarray, " packs"]]]:
    """Yields blocks of the packs that `next_fit` makes of sequences which arrive in the order of `lengths`.

    A block is the index of its first sequence, and the end of each pack, counted from there.

    For all sequences of a block together, it computes where a pack that begins with each would end; the packs are the
    chain through these ends. A pack that may extend beyond the block is left to the next one.
    """
    limit = pack_length + separators  # each sequence has separators; after the last one they need no slots
    deepest = min(max_sequences_per_pack, pack_length)
    start = 0
    while start < len(lengths):
        block = lengths[start : start + max(_BLOCK, 2 * deepest)]
        last = start + len(block) == len(lengths)
        total = np.zeros(len(block) + 1, dtype=np.int64)
        np.cumsum(block, dtype=np.int64, out=total[1:])
        total += separators * np.arange(len(total))
        following = np.searchsorted(total, total[:-1] + limit, side="right") - 1
        following = np.minimum(following, np.arange(deepest, deepest + len(block)))
        ends = _chain(following.tolist())
        if not last and ends[-1] == len(block):
            ends.pop()
        yield start, np.array(ends, dtype=np.int64)
        start += ends[-1]


def _chain(following: list[int]) -> list[int]:
    """Returns the positions reached from 0 by following the list, until its end."""
    visited = []
    index, end = 0, len(following)
    while index < end:
        index = following[index]
        visited.append(index)
    return visited


def _counted(
    lengths: Integer[np.ndarray, " sequences"], depths: Integer[np.ndarray, " packs"], longest: int
) -> dict[Strategy, int]:
    """Returns how often each strategy occurs; `lengths` holds one pack after another, each pack's longest first."""
    starts = np.cumsum(depths, dtype=np.int64) - depths
    values = list(range(longest + 1))  # one object for each length, where tolist makes one for each element
    used: dict[Strategy, int] = {}
    for depth in np.flatnonzero(np.bincount(depths)).tolist():
        of_depth = starts[depths == depth]
        columns = [lengths[of_depth + offset] for offset in range(depth)]
        first, counts = _distinct_rows(columns, longest + 1)
        rows = zip(*(map(values.__getitem__, column[first].tolist()) for column in columns), strict=True)
        used.update(zip(rows, counts.tolist(), strict=True))
    return used


def _distinct_rows(
    columns: list[Integer[np.ndarray, " rows"]], base: int
) -> tuple[Int64[np.ndarray, " distinct"], Int64[np.ndarray, " distinct"]]:
    """Returns the first row of each kind, and how many there are of it; all values are below `base`.

    The columns are read as the digits of one number. Before it can outgrow 64 bits, it is replaced by its rank.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    bound = 1  # above each key
    for column in columns:
        if bound * base >= 1 << 63:
            kinds, key = np.unique(key, return_inverse=True)
            bound = len(kinds)
        key = key * base + column
        bound *= base
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    return first, counts
