"""The sequences of a view, rewritten in random order: two passes that can be resumed after an interruption.

FOLDER/shuffled.{bin,idx}             a token file whose documents are the sequences, row after row
FOLDER/shuffled_sequence_ids.npy      the id of each of them in the view
FOLDER/shuffle_columns/               the same two between the passes, column after column; removed at the end

The first pass loads each column of the grid, permutes it and appends it to the files between the passes, where the
shard of each row is a range of sequences. The second pass loads each row of the grid, permutes it and appends it to
the token file. The journals of both say how many columns and rows are finished.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.mapped_pages import release_mapped_pages
from evenpack.data.permutation import sequence_id_type
from evenpack.data.ranges import cut
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView
from evenpack.data.sequences.view import length_chunks
from evenpack.data.shuffle.grid import BYTES_PER_SEQUENCE, Grid, equal_parts
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile, hash_sequences, joined_slices
from evenpack.data.tokens.writer import Journal, TokenFileWriter, column_path, journal_path, read_journal
from evenpack.errors import RunError

_CHUNK_TOKENS = 1 << 18
_WORD = (1 << 64) - 1
_CHUNKS_MAPPED = 16
"""Number of chunks after which the mapped pages of the source are released."""
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
            stops, lengths = ends[chosen], self.lengths[chosen]
            tokens = joined_slices(self.tokens, stops - lengths, stops)
            yield Sequences(tokens=tokens, lengths=lengths, ids=self.ids[chosen])


def content_of(tokens: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " N"]) -> int:
    """Returns the sum, modulo 2**64, of XXH3 (64 bits) of each sequence, which depends on no order and no type."""
    return int(hash_sequences(tokens, lengths).sum(dtype=np.uint64))


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
    return cut(np.append(0, np.cumsum(lengths, dtype=np.int64)), _CHUNK_TOKENS)


ReportProgress = Callable[[int, int], None]
"""Progress callback: sequences written and bytes read so far, of twice the bytes of all sequences."""


def remove_shuffle(folder: Path) -> None:
    """Removes all files of a shuffle from the folder of a source, the journal that vouches for them first."""
    journal_path(folder / SHUFFLED).unlink(missing_ok=True)
    for path in folder.glob(f"{SHUFFLED}*"):
        path.unlink()
    shutil.rmtree(folder / _COLUMNS, ignore_errors=True)


def append_row(writer: TokenFileWriter, sequences: Sequences, grid: Grid, row: int) -> int:
    """Appends the sequences of row `row` of the grid. Returns: their content hash, as they were given to the writer."""
    content = 0
    for chunk in sequences.reordered(grid.row_order(row, len(sequences.lengths))):
        content += content_of(chunk.tokens, chunk.lengths)
        writer.append(chunk.tokens, chunk.lengths, {SOURCE_IDS: chunk.ids})
    return content


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
        journal = read_journal(prefix)
        if journal is None or journal.state.get("origin") != self.origin:
            remove_shuffle(self.folder)
        with self._writer(prefix) as writer:
            if not writer.complete:
                if not writer.state:
                    writer.commit({"origin": self.origin, "rows": 0, "content": 0})
                read = self._write_columns()
                self._write_rows(writer, read)
            journal = writer.finish()
        shutil.rmtree(self.folder / _COLUMNS, ignore_errors=True)
        return journal

    def _writer(self, prefix: Path) -> TokenFileWriter:
        columns = {SOURCE_IDS: self._id_type.newbyteorder("<").str}
        return TokenFileWriter.resume(prefix, vocabulary_size=self.vocabulary_size, columns=columns)

    @property
    def _id_type(self) -> np.dtype:
        return sequence_id_type(self.view.count)

    @property
    def _columns_prefix(self) -> Path:
        return self.folder / _COLUMNS / "columns"

    @cached_property
    def _bounds(self) -> list[int]:
        """The first sequence of each column, and their number; columns take equal memory, also of short sequences."""
        token_bytes = self.view.token_file.dtype.itemsize
        sizes = (chunk.astype(np.int64) * token_bytes + BYTES_PER_SEQUENCE for chunk in length_chunks(self.view))
        total = token_bytes * self.view.accounting.tokens_kept + BYTES_PER_SEQUENCE * self.view.count
        return equal_parts(sizes, total=total, parts=self.grid.columns)

    def _write_columns(self) -> int:
        """Runs the first pass. Returns: the content hash of all sequences, as they were read."""
        buffer = TokenBuffer(self.view.token_file.dtype)
        with self._writer(self._columns_prefix) as writer:
            state = {"columns": 0, "content": 0, **writer.state}
            for column in range(state["columns"], self.grid.columns):
                first, stop = self._bounds[column : column + 2]
                sequences, content = self._load_column(first, stop, buffer, tokens_before=writer.tokens)
                for chunk in sequences.reordered(self.grid.column_order(column, stop - first)):
                    writer.append(chunk.tokens, chunk.lengths, {SOURCE_IDS: chunk.ids})
                state = {"columns": column + 1, "content": (state["content"] + content) & _WORD}
                writer.commit(state)
            writer.finish()
        return int(state["content"])

    def _load_column(self, first: int, stop: int, buffer: TokenBuffer, *, tokens_before: int) -> tuple[Sequences, int]:
        """Returns the sequences `first` to `stop` of the view, and their content hash."""
        lengths = self.view.lengths(first, stop)
        tokens = buffer.take(int(lengths.sum(dtype=np.int64)))
        place = content = 0
        for index, (begin, end) in enumerate(chunks(lengths)):
            read = self.view.read(np.arange(first + begin, first + end)).tokens
            content += content_of(read, lengths[begin:end])
            tokens[place : place + len(read)] = read
            place += len(read)
            if index % _CHUNKS_MAPPED == 0:
                self.view.release_pages()
            self.report_progress(0, (tokens_before + place) * tokens.itemsize)
        return Sequences(tokens=tokens, lengths=lengths, ids=np.arange(first, stop).astype(self._id_type)), content

    def _write_rows(self, writer: TokenFileWriter, content_read: int) -> None:
        """Runs the second pass. Raises: RunError if it has written other sequences than the first one read."""
        columns = TokenFile(self._columns_prefix, verify=False)
        ids = open_array(column_path(self._columns_prefix, SOURCE_IDS))
        buffer, state = TokenBuffer(columns.dtype), dict(writer.state)
        for row in range(state["rows"], self.grid.rows):
            content = append_row(writer, self._load_row(columns, ids, row, buffer), self.grid, row)
            state |= {"rows": row + 1, "content": (state["content"] + content) & _WORD}
            writer.commit(state)
            self.report_progress(writer.documents, (columns.tokens + writer.tokens) * columns.dtype.itemsize)
        if content_read != state["content"]:
            raise RunError(
                f"the shuffle of {self.view.token_file.prefix} has read sequences whose hashes sum to "
                f"{content_read:016x} and written others, {state['content']:016x}: remove {self.folder} and prepare "
                "again; if it happens twice, suspect memory or disk"
            )

    def _load_row(
        self, columns: TokenFile, ids: Integer[np.ndarray, " sequences"], row: int, buffer: TokenBuffer
    ) -> Sequences:
        """Loads shard `row` of every column, one after the other."""
        shards = [(first, *self.grid.shards(stop - first)[row]) for first, stop in pairwise(self._bounds)]
        ranges = [(first + begin, first + end) for first, begin, end in shards]
        lengths = np.concatenate([columns.document_lengths(*one) for one in ranges]).astype(np.int32)
        tokens, place = buffer.take(int(lengths.sum(dtype=np.int64))), 0
        for one in ranges:
            begin, end = columns.document_starts(np.array(one)).tolist()
            tokens[place : place + end - begin] = columns.read(begin, end)
            place += end - begin
            columns.release_pages()
        row_ids = np.concatenate([ids[begin:end] for begin, end in ranges])
        release_mapped_pages([ids])
        return Sequences(tokens=tokens, lengths=lengths, ids=row_ids)
