"""Files of labelled examples: tab-separated, one row a line, no quoting."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack.config import nearest
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.tasks.glue import GlueTask
from evenpack.errors import DataError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One example as its file has it."""

    texts: tuple[str, ...]
    """A, or A and B."""
    label: str
    """Not yet held against the task's classes."""
    where: str
    """File and line, for messages."""
    bytes_read: int
    """Of the file, this row included or read ahead."""


def read_task_rows(path: Path, task: GlueTask) -> Iterator[TaskRow]:
    """Every example of a training or validation file, in order.

    Raises: DataError naming file and line for a header row without the task's columns, for a row with too few columns
    (left out, and counted in a warning, where the task `has_cut_rows`), and for text that is not UTF-8.
    """
    with SourceReader(path) as reader:
        lines = (reader.decode(line).rstrip("\r\n").split("\t") for line in reader.lines())
        columns = task.columns or _header(next(lines, None), path)
        places = [_place(columns, name, path) for name in (*task.texts, task.label)]
        cut_rows = 0
        for cells in lines:
            if len(cells) <= max(places):
                if not task.has_cut_rows:
                    raise DataError(_too_few(reader.where, columns, cells))
                cut_rows += 1
                continue
            *texts, label = (cells[place] for place in places)
            yield TaskRow(texts=tuple(texts), label=label, where=reader.where, bytes_read=reader.bytes_read)
    if cut_rows:
        _logger.warning("%s: left out %d rows that end too early", path, cut_rows)


def _header(cells: Sequence[str] | None, path: Path) -> Sequence[str]:
    if cells is None:
        raise DataError(f"{path} is empty: expected a row that names the columns")
    return cells


def _place(columns: Sequence[str], name: str, path: Path) -> int:
    if name not in columns:
        raise DataError(f"{path}, line 1 names no column '{name}'; {nearest(name, list(columns))}")
    return columns.index(name)


def _too_few(where: str, columns: Sequence[str], cells: Sequence[str]) -> str:
    return (
        f"{where}: expected {len(columns)} columns between tabs ({', '.join(columns)}), found {len(cells)}: "
        f"{cells[0]!r:.60}; take the file as the benchmark gives it out"
    )
