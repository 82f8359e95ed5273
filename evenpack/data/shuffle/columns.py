"""The first pass: each column of the grid is loaded, permuted and written as the shards of all rows.

00012.tokens     its sequences in their new order, row after row
00012.lengths    int32[sequences]
00012.ids        int32 or int64[sequences]: the id of each sequence in the view
00012.json       written last: a column that has it is complete
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from evenpack.data.sequences.shuffled import OrderedView
from evenpack.data.shuffle.grid import Grid
from evenpack.data.shuffle.sequences import Sequences, TokenBuffer, chunks
from evenpack.errors import DataError
from evenpack.files import atomic_open, read_json, write_json

_CHUNKS_MAPPED = 16
"""Number of chunks after which the mapped pages of the source are released."""
_SUFFIXES = ("tokens", "lengths", "ids")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a column that belongs to one row."""

    sequences: int
    tokens: int
    checksum: str
    """XXH3 (128 bits) of its tokens, lengths and ids."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A finished column."""

    shards: tuple[Shard, ...]
    """Shards by row."""
    content: int
    """Content hash of all its sequences, as they were read."""

    @cached_property
    def first_tokens(self) -> tuple[int, ...]:
        """Returns the start of each row's shard in the column, in tokens, and the end of the last one."""
        return tuple(accumulate((shard.tokens for shard in self.shards), initial=0))

    @cached_property
    def first_sequences(self) -> tuple[int, ...]:
        """Returns the same, in sequences."""
        return tuple(accumulate((shard.sequences for shard in self.shards), initial=0))

    @property
    def tokens(self) -> int:
        return self.first_tokens[-1]

    @property
    def sequences(self) -> int:
        return self.first_sequences[-1]


@dataclass(frozen=True, kw_only=True)
class ColumnFolder:
    """The folder of a shuffle's columns until its rows are written."""

    folder: Path
    id_type: np.dtype
    buffer: TokenBuffer

    def read(self, column: int, *, rows: int) -> Column | None:
        """Returns the column; None unless it is complete.

        Raises: DataError if its record is not one of so many rows.
        """
        path = self._path(column, "json")
        if not path.is_file():
            return None
        try:
            values = read_json(path)
            found = Column(shards=tuple(Shard(**shard) for shard in values["shards"]), content=values["content"])
            if len(found.shards) != rows:
                raise ValueError(f"{len(found.shards)} shards, expected {rows}")
            return found
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} is not a record of a column ({error}); remove {self.folder} and prepare again"
            ) from error

    def write(
        self, column: int, view: OrderedView, grid: Grid, first: int, stop: int, *, report_read: Callable[[int], None]
    ) -> Column:
        """Loads the sequences `first` to `stop` of the view and writes them permuted.

        `report_read` is called with the bytes read.
        """
        sequences = self._load(view, first, stop, report_read)
        content = sequences.content()
        order = grid.column_order(column, stop - first)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            atomic_open(self._path(column, "tokens")) as tokens,
            atomic_open(self._path(column, "lengths")) as lengths,
            atomic_open(self._path(column, "ids")) as ids,
        ):
            shards = tuple(
                _write_shard(sequences, order[begin:end], (tokens, lengths, ids))
                for begin, end in grid.shards(stop - first)
            )
        written = Column(shards=shards, content=content)
        write_json(self._path(column, "json"), asdict(written))
        return written

    def load_shard(self, column: int, record: Column, row: int, into: Sequences) -> None:
        """Fills arrays of the right sizes with one shard. Raises: DataError if it is not as it was written."""
        first_token, first_sequence = record.first_tokens[row], record.first_sequences[row]
        digest = xxhash.xxh3_128()
        arrays = (into.tokens, into.lengths, into.ids)
        for suffix, first, array in zip(_SUFFIXES, (first_token, first_sequence, first_sequence), arrays, strict=True):
            content = array.view(np.uint8).data
            _read(self._path(column, suffix), first * array.itemsize, content)
            digest.update(content)
        if digest.hexdigest() != record.shards[row].checksum:
            raise DataError(
                f"row {row} of {self._path(column, 'tokens')} and the files beside it is not as it was written: "
                f"remove {self.folder} and prepare again"
            )

    def _load(self, view: OrderedView, first: int, stop: int, report_read: Callable[[int], None]) -> Sequences:
        lengths = view.lengths(first, stop)
        tokens = self.buffer.take(int(lengths.sum(dtype=np.int64)))
        place = 0
        for index, (begin, end) in enumerate(chunks(lengths)):
            read = view.gather(np.arange(first + begin, first + end))
            tokens[place : place + len(read)] = read
            place += len(read)
            if index % _CHUNKS_MAPPED == 0:
                view.release_pages()
            report_read(place * tokens.itemsize)
        return Sequences(tokens=tokens, lengths=lengths, ids=np.arange(first, stop).astype(self.id_type))

    def _path(self, column: int, suffix: str) -> Path:
        return self.folder / f"{column:05}.{suffix}"


def _write_shard(sequences: Sequences, order: np.ndarray, files: tuple[IO[Any], ...]) -> Shard:
    """Appends the sequences that `order` names to the files of tokens, lengths and ids."""
    tokens = 0
    digest = xxhash.xxh3_128()
    for chunk in sequences.in_order(order):
        files[0].write(chunk.tokens.data)
        digest.update(chunk.tokens.data)
        tokens += len(chunk.tokens)
    for file, values in zip(files[1:], (sequences.lengths[order], sequences.ids[order]), strict=True):
        file.write(values.data)
        digest.update(values.data)
    return Shard(sequences=len(order), tokens=tokens, checksum=digest.hexdigest())


def _read(path: Path, offset: int, into: memoryview) -> None:
    """Reads values from a file. Raises: DataError if the file is missing or too short."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while into:
                read = file.readinto(into)
                if not read:
                    raise DataError(
                        f"{path} ends after {path.stat().st_size} bytes: remove {path.parent} and prepare again"
                    )
                into = into[read:]
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: remove {path.parent} and prepare again") from error
