"""Sequences in memory, one after the other in one array: taken in another order, and known by a sum of hashes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from jaxtyping import Int64, Integer

_CHUNK_TOKENS = 1 << 22
_WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """N sequences with their ids, concatenated."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Integer[np.ndarray, " N"]
    ids: Integer[np.ndarray, " N"]
    """In the view that they come from."""

    def in_order(self, order: Int64[np.ndarray, " N"]) -> Iterator["Sequences"]:
        """Copies of the sequences that `order` names, a few megabytes at a time."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for first, stop in chunks(self.lengths[order]):
            chosen = order[first:stop]
            stops = ends[chosen]
            starts = stops - self.lengths[chosen]
            slices = [self.tokens[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
            yield Sequences(tokens=np.concatenate(slices), lengths=self.lengths[chosen], ids=self.ids[chosen])

    def content(self) -> int:
        """The sum, modulo 2**64, of XXH3 (64 bits) of each sequence: the same in any order, for the same sequences."""
        ends = (np.cumsum(self.lengths, dtype=np.int64) * self.tokens.itemsize).tolist()
        data = np.ascontiguousarray(self.tokens).view(np.uint8).data
        total = begin = 0
        for end in ends:
            total += xxhash.xxh3_64_intdigest(data[begin:end])
            begin = end
        return total & _WORD


def chunks(lengths: Integer[np.ndarray, " N"]) -> Iterator[tuple[int, int]]:
    """Ranges of sequences of 8 or 16 MB each, or of one sequence that is longer."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + _CHUNK_TOKENS, side="right")))
        yield first, stop
        first = stop


def add_contents(first: int, second: int) -> int:
    """Of the sequences of both."""
    return (first + second) & _WORD
