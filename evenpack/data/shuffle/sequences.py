"""Sequences in memory, concatenated in one array: they can be reordered, and have a hash sum that no order changes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from jaxtyping import Int64, Integer

_CHUNK_TOKENS = 1 << 18
_WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """N sequences with their ids, concatenated."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Integer[np.ndarray, " N"]
    ids: Integer[np.ndarray, " N"]
    """Ids in the view from which they were read."""

    def in_order(self, order: Int64[np.ndarray, " N"]) -> Iterator["Sequences"]:
        """Yields copies of the sequences that `order` names, a part at a time."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for first, stop in chunks(self.lengths[order]):
            chosen = order[first:stop]
            stops = ends[chosen]
            starts = stops - self.lengths[chosen]
            slices = map(self.tokens.__getitem__, map(slice, starts.tolist(), stops.tolist()))
            yield Sequences(tokens=np.concatenate(list(slices)), lengths=self.lengths[chosen], ids=self.ids[chosen])

    def content(self) -> int:
        """The sum, modulo 2**64, of XXH3 (64 bits) of each sequence, which does not depend on their order."""
        ends = (np.cumsum(self.lengths, dtype=np.int64) * self.tokens.itemsize).tolist()
        data = np.ascontiguousarray(self.tokens).view(np.uint8).data
        slices = map(data.__getitem__, map(slice, [0, *ends[:-1]], ends))
        return sum(map(xxhash.xxh3_64_intdigest, slices)) & _WORD


class TokenBuffer:
    """A reused buffer for the tokens of columns and rows: fresh pages for each would cost more than the copy."""

    def __init__(self, kind: np.dtype) -> None:
        self._kind = kind
        self._array = np.empty(0, dtype=kind)

    def take(self, tokens: int) -> Integer[np.ndarray, " tokens"]:
        """Returns an uninitialised array of so many tokens; the array taken before is overwritten."""
        if len(self._array) < tokens:
            self._array = np.empty(0, dtype=self._kind)  # frees the old array before the new one is allocated
            self._array = np.empty(tokens, dtype=self._kind)
        return self._array[:tokens]


def chunks(lengths: Integer[np.ndarray, " N"]) -> Iterator[tuple[int, int]]:
    """Yields ranges of sequences of up to half a megabyte, which a core's cache holds, or of one longer sequence."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + _CHUNK_TOKENS, side="right")))
        yield first, stop
        first = stop


def add_contents(first: int, second: int) -> int:
    """Returns the content hash of the sequences of both."""
    return (first + second) & _WORD
