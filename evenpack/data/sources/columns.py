"""A text column of files that store rows in blocks: row groups of parquet, record batches of Arrow."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpack.data.sources.corpus import Document, make_document
from evenpack.data.sources.input_files import too_long_error
from evenpack.errors import DataError

if TYPE_CHECKING:
    from evenpack.data.sources.tables import BlockTable, Rows

TableOpener = Callable[[Path], "BlockTable"]
"""Opens a table; a function of a module, so that it can be pickled. It imports what it needs: pyarrow takes a while."""


@dataclass(frozen=True, kw_only=True)
class ColumnPiece:
    """The strings of one column; blocks before the first requested document are not read."""

    path: Path
    text_key: str
    open_table: TableOpener
    longest_text_bytes: int
    first_block: int = 0
    begin: int = 0
    """The first row, which begins its block."""
    stop: int | None = None
    """The row after the last one; None at the end of the file."""
    share_bytes: int | None = None
    """Bytes of the file, in proportion to the content of its blocks; None for the whole file."""

    @property
    def name(self) -> str:
        rows = "" if self.stop is None else f", rows {self.begin:,} to {self.stop - 1:,} (from 0)"
        return f"{self.path}{rows}"

    @property
    def total_bytes(self) -> int:
        return self.path.stat().st_size if self.share_bytes is None else self.share_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        table = self.open_table(self.path)
        column = table.text_column(self.text_key)
        stop = sum(block.rows for block in table.blocks(column)) if self.stop is None else self.stop
        count, total_bytes = stop - self.begin, self.total_bytes
        if start >= count:
            return start - count
        done = start
        found = table.rows(
            column,
            as_text=True,
            start=self.begin + start,
            stop=stop,
            first_block=self.first_block,
            first_row=self.begin,
        )
        for rows in found:
            for index, text in enumerate(self._texts(rows)):
                done += 1
                yield make_document(text, bytes_before + total_bytes * done // count, partial(rows.place, index))
        return 0

    def divided(self, target_bytes: int) -> tuple["ColumnPiece", ...]:
        """Yields neighbouring blocks together, up to `target_bytes`."""
        table = self.open_table(self.path)
        blocks = table.blocks(table.text_column(self.text_key))
        rows = [0, *accumulate(block.rows for block in blocks)]
        weights = [0, *accumulate(block.weight for block in blocks)]
        edges = [self.total_bytes * weight // max(1, weights[-1]) for weight in weights]
        cuts = tuple(_cuts(edges, target_bytes))
        if len(cuts) < 2:
            return (self,)
        return tuple(
            replace(
                self,
                first_block=first,
                begin=rows[first],
                stop=rows[last],
                share_bytes=edges[last] - edges[first],
            )
            for first, last in cuts
        )

    def _texts(self, rows: "Rows") -> Iterator[str]:
        """Yields texts.

        Raises: DataError with file and row for a null, for a text that is too long, or for bytes that are not UTF-8.
        """
        for index, value in enumerate(rows.columns[0]):
            refuse_long_text(value, partial(rows.place, index), most=self.longest_text_bytes)
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(f"{rows.place(index)}: '{self.text_key}' is not valid UTF-8: {error.reason}") from error
            if text is None:
                raise DataError(f"{rows.place(index)}: '{self.text_key}' is null, expected a string")
            yield text


def refuse_long_text(value: Any, where: Callable[[], str], *, most: int) -> None:
    """Checks a scalar of `pyarrow` before it is copied. Raises: DataError for a text of more than `most` bytes."""
    value = getattr(value, "value", value)  # that of a dictionary
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    if buffer is not None and buffer.size > most:
        raise too_long_error(where(), "text", most=most)


def _cuts(edges: Sequence[int], target: int) -> Iterator[tuple[int, int]]:
    """Yields neighbours, given by the edges between them, combined up to `target`: first and one past the last."""
    first = 0
    for last in range(1, len(edges)):
        if last + 1 == len(edges) or edges[last + 1] - edges[first] > target:
            yield first, last
            first = last
