"""Reads rows of shards, some thousand at a time: never a whole shard.

Shapes: R = rows, S = slots of a row, P = masks that fit a row, K = sequences, T = tokens, M = masked tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from evenpack.data.shards.checks import RawSequences, checked
from evenpack.data.shards.layout import LABELS, MASKS, PACKED, ROWS, ShardSet, open_file
from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.errors import DataError

ROWS_AT_ONCE = 2048
"""Rows read at once: some 10 MB of rows of 512 slots, a few times that while they are checked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSlice:
    """Some consecutive rows of the set."""

    sequences: MaskedSequences
    place: Callable[[int], str]
    """Returns a description of file and row of the n-th of these sequences."""
    rows_read: int
    """Rows read of the whole set, including these."""
    bytes_read: int
    """Bytes read of `ShardSet.total_bytes`, in proportion to the rows of the file."""


def read_slices(shards: ShardSet, start: int = 0) -> Iterator[ShardSlice]:
    """Yields the set's rows from number `start` on; earlier rows are not read.

    Raises: DataError naming file and row for a row that cannot be a masked pair.
    """
    rows_before = bytes_before = 0
    for shard in shards.shards:
        size = shard.path.stat().st_size
        first = max(0, start - rows_before)
        if first < shard.rows:
            with open_file(shard.path) as file:
                for begin, end in _ranges(first, shard.rows, shard.chunk_rows):
                    raw = _READERS[shards.layout](file, begin, end, shard.path)
                    yield ShardSlice(
                        sequences=checked(raw),
                        place=raw.place,
                        rows_read=rows_before + end,
                        bytes_read=bytes_before + size * end // shard.rows,
                    )
        rows_before += shard.rows
        bytes_before += size


def _ranges(first: int, rows: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of whole chunks, so that none is decompressed twice."""
    at_once = max(1, ROWS_AT_ONCE // chunk_rows) * chunk_rows
    while first < rows:
        end = min((first // at_once + 1) * at_once, rows)
        yield first, end
        first = end


def _read_fixed(file: Any, begin: int, end: int, path: Path) -> RawSequences:
    ids, segments, filled, places, labels = (
        file[name][begin:end] for name in (ROWS[0], ROWS[1], "input_mask", MASKS[0], MASKS[1])
    )
    lengths, counts = np.count_nonzero(filled, axis=1), np.count_nonzero(places, axis=1)
    is_token = np.arange(ids.shape[1]) < lengths[:, None]
    is_mask = np.arange(places.shape[1]) < counts[:, None]
    _refuse((filled != is_token).any(axis=1), begin, path, "input_mask is not ones followed by zeros")
    _refuse(
        ((places != 0) != is_mask).any(axis=1), begin, path, "masked_lm_positions has a position after its padding (0)"
    )
    return RawSequences(
        path=path,
        rows=np.arange(begin, end),
        tokens=ids[is_token],
        lengths=lengths,
        segment_ids=segments[is_token],
        next_sentence_labels=file[LABELS][begin:end].astype(np.int64),
        mask_counts=counts,
        mask_places=places[is_mask].astype(np.int64),
        mask_labels=labels[is_mask].astype(np.int64),
    )


def _read_variable(file: Any, begin: int, end: int, path: Path) -> RawSequences:
    found = {name: file[name][begin:end] for name in (*ROWS, *MASKS)}
    lengths, counts = _lengths(found[ROWS[0]]), _lengths(found[MASKS[0]])
    _refuse(_lengths(found[ROWS[1]]) != lengths, begin, path, "segment_ids is not as long as input_ids")
    _refuse(_lengths(found[MASKS[1]]) != counts, begin, path, "masked_lm_ids is not as long as masked_lm_positions")
    return RawSequences(
        path=path,
        rows=np.arange(begin, end),
        tokens=_joined(found[ROWS[0]]),
        lengths=lengths,
        segment_ids=_joined(found[ROWS[1]]),
        next_sentence_labels=file[LABELS][begin:end].astype(np.int64),
        mask_counts=counts,
        mask_places=_joined(found[MASKS[0]]).astype(np.int64),
        mask_labels=_joined(found[MASKS[1]]).astype(np.int64),
    )


def _read_packed(file: Any, begin: int, end: int, path: Path) -> RawSequences:
    found = {name: file[name][begin:end] for name in (*ROWS, *MASKS, *PACKED, LABELS)}
    sequences = _lengths(found[PACKED[0]])
    row_of_sequence = np.repeat(np.arange(end - begin), sequences)
    lengths, counts = (_joined(found[name]).astype(np.int64) for name in PACKED)
    for name, least in ((PACKED[0], 1), (PACKED[1], 0)):
        too_few = np.array([(row < least).any() for row in found[name]], dtype=np.bool_)
        _refuse(too_few, begin, path, f"{name} has a value below {least}")
    for name in (PACKED[1], LABELS):
        _refuse(_lengths(found[name]) != sequences, begin, path, f"{name} has not one value for each {PACKED[0]}")
    for parts, division, names in ((lengths, PACKED[0], ROWS), (counts, PACKED[1], MASKS)):
        sums = np.bincount(row_of_sequence, weights=parts, minlength=end - begin)
        for name in names:
            _refuse(_lengths(found[name]) != sums, begin, path, f"{name} is not as long as {division} says")
    starts = np.cumsum(lengths) - lengths
    row_starts = np.cumsum(_lengths(found[ROWS[0]])) - _lengths(found[ROWS[0]])
    within_row = starts - row_starts[row_of_sequence]
    return RawSequences(
        path=path,
        rows=begin + row_of_sequence,
        tokens=_joined(found[ROWS[0]]),
        lengths=lengths,
        segment_ids=_joined(found[ROWS[1]]),
        next_sentence_labels=_joined(found[LABELS]).astype(np.int64),
        mask_counts=counts,
        mask_places=_joined(found[MASKS[0]]).astype(np.int64) - np.repeat(within_row, counts),
        mask_labels=_joined(found[MASKS[1]]).astype(np.int64),
    )


_READERS = {"fixed": _read_fixed, "variable": _read_variable, "packed": _read_packed}


def _lengths(rows: np.ndarray) -> Int64[np.ndarray, " R"]:
    """Returns the lengths of variable-length rows."""
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def _joined(rows: np.ndarray) -> np.ndarray:
    joined: np.ndarray = np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int64)
    return joined


def _refuse(wrong: np.ndarray, begin: int, path: Path, problem: str) -> None:
    """Raises: DataError naming the first of the rows for which `wrong` holds."""
    (bad,) = np.nonzero(wrong)
    if len(bad):
        raise DataError(f"{path}, row {begin + bad[0]} (from 0): {problem}")
