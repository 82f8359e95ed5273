"""The sequences of a view, rewritten in random order: two passes that can be resumed after an interruption.

FOLDER/shuffled.{bin,idx}             a token file whose documents are the sequences, row after row
FOLDER/shuffled_sequence_ids.npy      the id of each of them in the view
FOLDER/shuffle_columns/               intermediate files between the passes; removed at the end
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.data.order.plan import sequence_id_type
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView
from evenpack.data.sequences.view import length_chunks
from evenpack.data.shuffle.columns import Column, ColumnFolder
from evenpack.data.shuffle.grid import BYTES_PER_SEQUENCE, Grid, equal_parts
from evenpack.data.shuffle.rows import append_row
from evenpack.data.shuffle.sequences import TokenBuffer, add_contents
from evenpack.data.tokens.file import Journal, TokenFileWriter, read_journal
from evenpack.data.tokens.journal import journal_path
from evenpack.errors import DataError, RunError

_COLUMNS = "shuffle_columns"

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
            state |= {"rows": row + 1, "content": add_contents(state["content"], content)}
            writer.commit(state)
            self.report_progress(writer.documents, first_pass + token_bytes * writer.tokens)

    def _compare(self, columns: tuple[Column, ...], written: int) -> None:
        read = 0
        for column in columns:
            read = add_contents(read, column.content)
        if read != written:
            raise RunError(
                f"the shuffle of {self.view.token_file.prefix} has read sequences whose hashes sum to {read:016x} and "
                f"written others, {written:016x}: remove {self.folder} and prepare again; if it happens twice, "
                "suspect memory or disk"
            )
