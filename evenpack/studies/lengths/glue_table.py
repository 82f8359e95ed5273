"""Tasks of GLUE, from their own files, as tables of texts."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from evenpack.data.sources.tables import LONG_ROWS_AT_ONCE, Rows
from evenpack.data.tasks.glue import TaskRow, find_glue_task, glue_file, read_task_rows


class GlueTable:
    """One split of a task, from a folder of task folders."""

    untyped = False

    def __init__(self, name: str, directory: Path, split: str) -> None:
        """Finds the file. Raises: ConfigError for an unknown task or split; DataError for a missing file."""
        self._task = find_glue_task(name)
        self._path = glue_file(directory, self._task, split)
        self.origin = str(self._path)
        self.schema: dict[str, Any] = dict.fromkeys(self._task.texts, pa.string())
        self.total_bytes = self._path.stat().st_size

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the columns that make a sequence."""
        return self._task.texts

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        places = [self._task.texts.index(name) for name in columns]
        examples = read_task_rows(self._path, self._task)
        while some := list(islice(examples, LONG_ROWS_AT_ONCE)):
            yield Rows(
                columns=tuple(pa.array([row.texts[place] for row in some], pa.string()) for place in places),
                place=_place_namer(some),
                bytes_read=some[-1].bytes_read,
            )


def _place_namer(rows: Sequence[TaskRow]) -> Callable[[int], str]:
    return lambda index: rows[index].where
