"""Files of labelled examples: tab-separated, one row a line, no quoting."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack.data.sources.input_files import SourceReader
from evenpack.data.tasks.glue import GlueTask
from evenpack.errors import DataError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One example of a file."""

    texts: tuple[str, ...]
    """The text A, or A and B."""
    label: str
    """The label as in the file, not yet compared with the task's classes."""
    where: str
    """File and line, for messages."""
    bytes_read: int
    """Bytes read of the file, including this row and any read ahead."""


def read_task_rows(path: Path, task: GlueTask) -> Iterator[TaskRow]:
    """Yields every example of a training or validation file, in order. Empty lines are not rows.

    Raises: DataError naming file and line for a header row without the task's columns, for a row of another number of
    columns (where the task `has_cut_rows`, rows of too few are left out and counted in a warning), and for text that is
    not UTF-8; naming the file where it cannot be opened or lacks its header row.
    """
    with SourceReader(path) as reader:
        rows = _rows_of_cells(reader)
        columns = task.columns or next(rows, None)
        if columns is None:
            raise DataError(f"{path} is empty: expected a header row that names the columns")
        places = [_place(columns, name, reader.where) for name in (*task.texts, task.label)]
        cut_rows = 0
        for cells in rows:
            if task.has_cut_rows and len(cells) < len(columns):
                cut_rows += 1
                continue
            if len(cells) != len(columns):
                raise DataError(_wrong_number(reader.where, columns, cells))
            *texts, label = (cells[place] for place in places)
            yield TaskRow(texts=tuple(texts), label=label, where=reader.where, bytes_read=reader.bytes_read)
    if cut_rows:
        _logger.warning("%s: left out %d rows that end too early", path, cut_rows)


def _rows_of_cells(reader: SourceReader) -> Iterator[list[str]]:
    for line in reader.lines():
        if text := reader.decode(line).rstrip("\r\n"):
            yield text.split("\t")


def _place(columns: Sequence[str], name: str, where: str) -> int:
    if name not in columns:
        raise DataError(
            f"{where}: expected a header row with a column '{name}', found {', '.join(columns):.200}; {_REMEDY}"
        )
    return columns.index(name)


def _wrong_number(where: str, columns: Sequence[str], cells: Sequence[str]) -> str:
    return (
        f"{where}: expected {len(columns)} columns between tabs ({', '.join(columns)}), found {len(cells)}, "
        f"the first of them {cells[0]!r:.60}; {_REMEDY}"
    )


_REMEDY = "use the file as the benchmark distributes it"
