"""The grid of a shuffle: how many rows and columns keep a memory limit, and the position of each sequence.

The sequences of a source, in their order, are cut into C columns of nearly equal tokens. The first pass loads column
after column, permutes it, and cuts it into R shards of nearly equal numbers of sequences. The second pass loads row
after row, shard r of every column, permutes it, and writes it. So two passes over the corpus can move any sequence to
any position of any row, and neither holds more than a column or a row.

If the shards of a column had random sizes, the result would be a uniform permutation (Rao 1961; Sandelius 1962); equal
sizes spread every column evenly over the rows, more evenly than chance would.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.keys import derive_key
from evenpack.data.permutation import permute
from evenpack.errors import DataError

PROGRAM_BYTES = 640 << 20
"""Memory of the process before it loads a column: the interpreter, libraries, buffers (measured: 0.45 to 0.6 GB)."""
BYTES_PER_SEQUENCE = 48
"""Memory per sequence in addition to its tokens, while a column or row is permuted: length, id, rank, permutation."""
_USED_SHARE = 0.9
"""Share of the memory that equal rows and columns may take, because real ones are only nearly equal."""
_LEAST_SHARD_BYTES = 1 << 18
"""Smallest shard: smaller reads would make the second pass random access."""
_MOST_SHARDS_OF_A_ROW = 1 << 16
_BYTES_PER_SHARD = 256
"""Memory of a shard's record, which is kept until the end."""

_COLUMN_ORDER = 0
_ROW_ORDER = 1
"""Purpose of a key."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """R x C shards and the permutations of their rows and columns."""

    rows: int
    columns: int
    seed: int

    def column_order(self, column: int, sequences: int) -> Int64[np.ndarray, " sequences"]:
        """Returns the order of the column's sequences, counted from 0, after the first pass."""
        return self._order(_COLUMN_ORDER, column, sequences)

    def row_order(self, row: int, sequences: int) -> Int64[np.ndarray, " sequences"]:
        """Returns the order of the row's sequences, shard after shard, after the second pass."""
        return self._order(_ROW_ORDER, row, sequences)

    def shards(self, sequences: int) -> list[tuple[int, int]]:
        """Returns the range of positions of each row's shard in a permuted column of so many sequences."""
        return list(pairwise(sequences * row // self.rows for row in range(self.rows + 1)))

    def _order(self, purpose: int, index: int, sequences: int) -> Int64[np.ndarray, " sequences"]:
        key = derive_key(self.seed, purpose, index)
        return permute(
            np.arange(sequences, dtype=np.int64),
            np.broadcast_to(np.int64(sequences), sequences),
            np.broadcast_to(key, sequences),
        )


def choose_grid(
    *, token_bytes: int, sequences: int, memory: int, seed: int, rows: int | None = None, columns: int | None = None
) -> Grid:
    """Returns the smallest grid whose rows and columns keep the limit, or the requested one, if it does.

    Args:
        token_bytes: bytes of all sequences together.
        memory: bytes that the process may hold.

    Raises: DataError with a limit or grid that is sufficient.
    """
    corpus = token_bytes + BYTES_PER_SEQUENCE * sequences
    room = int(_USED_SHARE * (memory - PROGRAM_BYTES))
    most = _most_columns(corpus)
    least = next(
        (count for count in range(max(1, corpus // max(room, 1)), most + 1) if _held(corpus, count) <= room), 0
    )
    if corpus > 0 and not least:
        raise DataError(
            f"a shuffle of {_gib(corpus)} needs shards of {_LEAST_SHARD_BYTES >> 10} KiB or more, which {_gib(memory)} "
            f"of memory cannot hold a row of: set data.shuffle.memory to {_gib(_least_memory(corpus))} or more"
        )
    least = max(least, 1)
    for name, asked in (("rows", rows), ("columns", columns)):
        if asked is not None and asked < least and least > 1:
            raise DataError(
                f"data.shuffle.{name} is {asked}: a {name[:-1]} would hold {_gib(corpus // asked)}, more than "
                f"{_gib(memory)} of memory can hold; give {least} or more, or leave it out"
            )
    return Grid(rows=rows or least, columns=columns or least, seed=seed)


def equal_parts(sizes: Iterable[Integer[np.ndarray, " chunk"]], *, total: int, parts: int) -> list[int]:
    """Cuts sequences, whose sizes come array by array and sum to `total`, into parts of nearly equal sizes.

    Returns: the first sequence of each part, and the number of sequences. A part is empty if a sequence before it is as
    large as several parts.
    """
    bounds = [0]
    seen = seen_sequences = 0
    for chunk in sizes:
        ends = seen + np.cumsum(chunk, dtype=np.int64)
        while len(bounds) < parts and (goal := total * len(bounds) // parts) <= (ends[-1] if len(ends) else 0):
            bounds.append(seen_sequences + int(np.searchsorted(ends, goal)) + 1)
        seen = int(ends[-1]) if len(ends) else seen
        seen_sequences += len(chunk)
    return [*bounds, *[seen_sequences] * (parts + 1 - len(bounds))]


def _held(corpus: int, count: int) -> int:
    """Returns the bytes of a row or column in a grid of `count` x `count`, and of the records of all shards."""
    return corpus // count + _BYTES_PER_SHARD * count**2


def _most_columns(corpus: int) -> int:
    """Returns the number of columns above which shards would be too small, or too many."""
    return max(1, min(math.isqrt(corpus // _LEAST_SHARD_BYTES), _MOST_SHARDS_OF_A_ROW))


def _least_memory(corpus: int) -> int:
    """Returns the bytes with which some grid is possible: the minimum of rows and records together."""
    best = round((corpus / (2 * _BYTES_PER_SHARD)) ** (1 / 3))
    count = min(max(best, 1), _most_columns(corpus))
    return math.ceil((_held(corpus, count) + 1) / _USED_SHARE) + PROGRAM_BYTES + 1


def _gib(size: int) -> str:
    """Returns a size in GiB, rounded up, so that a recommended value is sufficient."""
    return f"{math.ceil(100 * size / (1 << 30)) / 100:.2f} GiB"
