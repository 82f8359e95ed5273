"""The sequences of a view, rewritten in random order: two passes that can be resumed after an interruption.

FOLDER/shuffled.{bin,idx}             a token file whose documents are the sequences, row after row
FOLDER/shuffled_sequence_ids.npy      the id of each of them in the view
FOLDER/shuffle_columns/               intermediate files between the passes; removed at the end

The first pass loads each column of the grid, permutes it and writes it as the shards of all rows:

00012.tokens     its sequences in their new order, row after row
00012.lengths    int32[sequences]
00012.ids        int32 or int64[sequences]: the id of each sequence in the view
00012.json       written last: a column that has it is complete

The second pass loads each row of the grid, permutes it and appends it to the token file.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from jaxtyping import Int64, Integer

from evenpack.data.permutation import sequence_id_type
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView
from evenpack.data.sequences.view import length_chunks
from evenpack.data.shuffle.grid import BYTES_PER_SEQUENCE, Grid, equal_parts
from evenpack.data.tokens.writer import Journal, TokenFileWriter, journal_path, read_journal
from evenpack.errors import DataError, RunError
from evenpack.files import atomic_open, read_json, write_json

_CHUNK_TOKENS = 1 << 18
_WORD = (1 << 64) - 1
_CHUNKS_MAPPED = 16
"""Number of chunks after which the mapped pages of the source are released."""
_SUFFIXES = ("tokens", "lengths", "ids")
_COLUMNS = "shuffle_columns"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """N sequences with their ids, concatenated."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Integer[np.ndarray, " N"]
    ids: Integer[np.ndarray, " N"]
    """Ids in the view from which they were read."""

    def reordered(self, order: Int64[np.ndarray, " N"]) -> Iterator["Sequences"]:
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
            _read_into(self._path(column, suffix), first * array.itemsize, content)
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
            read = view.read(np.arange(first + begin, first + end)).tokens
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
    for chunk in sequences.reordered(order):
        files[0].write(chunk.tokens.data)
        digest.update(chunk.tokens.data)
        tokens += len(chunk.tokens)
    for file, values in zip(files[1:], (sequences.lengths[order], sequences.ids[order]), strict=True):
        file.write(values.data)
        digest.update(values.data)
    return Shard(sequences=len(order), tokens=tokens, checksum=digest.hexdigest())


def _read_into(path: Path, offset: int, into: memoryview) -> None:
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


def append_row(writer: TokenFileWriter, folder: ColumnFolder, columns: tuple[Column, ...], grid: Grid, row: int) -> int:
    """Appends row `row` of the grid. Returns: the content hash of its sequences, as they were given to the writer.

    Raises: DataError if a shard is not as it was written; RunError if the disk is full.
    """
    sequences = _load_row(folder, columns, row)
    content = 0
    for chunk in sequences.reordered(grid.row_order(row, len(sequences.lengths))):
        content += chunk.content()
        writer.append(chunk.tokens, chunk.lengths, {SOURCE_IDS: chunk.ids})
    return content & _WORD


def _load_row(folder: ColumnFolder, columns: tuple[Column, ...], row: int) -> Sequences:
    """Loads shard `row` of every column, one after the other."""
    shards = [column.shards[row] for column in columns]
    row_sequences = Sequences(
        tokens=folder.buffer.take(sum(shard.tokens for shard in shards)),
        lengths=np.empty(sum(shard.sequences for shard in shards), dtype=np.int32),
        ids=np.empty(sum(shard.sequences for shard in shards), dtype=folder.id_type),
    )
    sequence = token = 0
    for index, (column, shard) in enumerate(zip(columns, shards, strict=True)):
        part = Sequences(
            tokens=row_sequences.tokens[token : token + shard.tokens],
            lengths=row_sequences.lengths[sequence : sequence + shard.sequences],
            ids=row_sequences.ids[sequence : sequence + shard.sequences],
        )
        folder.load_shard(index, column, row, into=part)
        sequence, token = sequence + shard.sequences, token + shard.tokens
    return row_sequences


ReportProgress = Callable[[int, int], None]
"""Progress callback: sequences written and bytes read so far, of twice the bytes of all sequences."""


def remove_shuffle(folder: Path) -> None:
    """Removes all files of a shuffle from the folder of a source, the journal that vouches for them first."""
    journal_path(folder / SHUFFLED).unlink(missing_ok=True)
    for path in folder.glob(f"{SHUFFLED}*"):
        path.unlink()
    shutil.rmtree(folder / _COLUMNS, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class GridShuffler:
    """One shuffle of one source."""

    view: OrderedView
    grid: Grid
    folder: Path
    """Folder of the source."""
    vocabulary_size: int
    origin: dict[str, Any]
    """JSON of everything on which order and sequences depend; a change restarts the shuffle."""
    report_progress: ReportProgress

    def run(self) -> Journal:
        """Shuffles, resumes an interrupted shuffle, or finds it complete.

        Raises: DataError if the intermediate files are damaged; RunError if the disk is full, or if the sequences
        written differ from those read, which only broken hardware or a broken program can cause.
        """
        prefix = self.folder / SHUFFLED
        self._clear_unless_begun(prefix)
        columns_type = {SOURCE_IDS: sequence_id_type(self.view.count).newbyteorder("<").str}
        with TokenFileWriter.resume(prefix, vocabulary_size=self.vocabulary_size, columns=columns_type) as writer:
            if not writer.complete:
                if not writer.state:
                    writer.commit({"origin": self.origin, "rows": 0, "content": 0})
                columns = self._write_columns()
                self._write_rows(writer, columns)
                self._compare(columns, writer.state["content"])
            journal = writer.finish()
        shutil.rmtree(self.folder / _COLUMNS, ignore_errors=True)
        return journal

    @cached_property
    def _column_folder(self) -> ColumnFolder:
        return ColumnFolder(
            folder=self.folder / _COLUMNS,
            id_type=sequence_id_type(self.view.count),
            buffer=TokenBuffer(self.view.token_file.dtype),
        )

    def _clear_unless_begun(self, prefix: Path) -> None:
        journal = read_journal(prefix)
        if journal is None or journal.state.get("origin") != self.origin:
            remove_shuffle(self.folder)

    def _write_columns(self) -> tuple[Column, ...]:
        folder = self._column_folder
        token_bytes = self.view.token_file.dtype.itemsize
        # Columns take equal memory, even where many short sequences are neighbours.
        sizes = (chunk.astype(np.int64) * token_bytes + BYTES_PER_SEQUENCE for chunk in length_chunks(self.view))
        total = token_bytes * self.view.accounting.tokens_kept + BYTES_PER_SEQUENCE * self.view.count
        bounds = equal_parts(sizes, total=total, parts=self.grid.columns)
        columns: list[Column] = []
        bytes_before = 0
        for index in range(self.grid.columns):
            column = folder.read(index, rows=self.grid.rows) or folder.write(
                index,
                self.view,
                self.grid,
                bounds[index],
                bounds[index + 1],
                report_read=partial(self._report_read, bytes_before),
            )
            columns.append(column)
            bytes_before += column.tokens * token_bytes
        if sum(column.sequences for column in columns) != self.view.count:
            raise DataError(
                f"{folder.folder} holds columns of another grid: remove it and {self.folder / SHUFFLED}.* and prepare "
                "again"
            )
        return tuple(columns)

    def _report_read(self, before: int, of_column: int) -> None:
        self.report_progress(0, before + of_column)

    def _write_rows(self, writer: TokenFileWriter, columns: tuple[Column, ...]) -> None:
        token_bytes = self.view.token_file.dtype.itemsize
        first_pass = token_bytes * sum(column.tokens for column in columns)
        state = dict(writer.state)
        for row in range(state["rows"], self.grid.rows):
            content = append_row(writer, self._column_folder, columns, self.grid, row)
            state |= {"rows": row + 1, "content": (state["content"] + content) & _WORD}
            writer.commit(state)
            self.report_progress(writer.documents, first_pass + token_bytes * writer.tokens)

    def _compare(self, columns: tuple[Column, ...], written: int) -> None:
        read = sum(column.content for column in columns) & _WORD
        if read != written:
            raise RunError(
                f"the shuffle of {self.view.token_file.prefix} has read sequences whose hashes sum to {read:016x} and "
                f"written others, {written:016x}: remove {self.folder} and prepare again; if it happens twice, "
                "suspect memory or disk"
            )
