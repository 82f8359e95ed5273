"""Datasets of the hub or of a local folder as tables. GLUE's columns of text are known."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evenpack.data.sources.hub import load_rows
from evenpack.data.sources.tables import LONG_ROWS_AT_ONCE, Rows, row_namer
from evenpack.data.tasks.glue import find_glue_task
from evenpack.errors import DataError

_GLUE = "nyu-mll/glue"


class DatasetTable:
    """One split of a dataset."""

    untyped = False

    def __init__(self, source: str, split: str | None) -> None:
        """Loads NAME or NAME:SUBSET. Raises: DataError if it cannot be loaded."""
        name, _, subset = source.partition(":")
        if name == "glue" and not Path(name).is_dir():
            name = _GLUE
        folder = Path(name).expanduser()
        _refuse_prepared(folder)
        # A subset that is not a folder of its own is one that the dataset's README defines.
        if subset and (folder / subset).is_dir():
            folder, subset = folder / subset, ""
        loaded = load_rows(
            str(folder) if folder.is_dir() else name, subset or None, split or "train", label=f"dataset '{source}'"
        )
        self.origin = f"{source}, {split or 'train'}"
        self.schema: dict[str, Any] = {field.name: field.type for field in loaded.features.arrow_schema}
        self.total_bytes = int(loaded.data.nbytes)
        self._dataset = loaded

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        tables = self._dataset.select_columns(list(columns)).with_format("arrow")
        done = 0
        for table in tables.iter(batch_size=LONG_ROWS_AT_ONCE):
            first, done = done, done + len(table)
            yield Rows(
                columns=tuple(table.column(name).combine_chunks() for name in columns),
                place=row_namer(self.origin, first),
                bytes_read=self.total_bytes * done // len(self._dataset),
            )


def known_columns(source: str) -> tuple[str, ...]:
    """Returns the text columns of a task of GLUE for NAME:TASK, where NAME may be a folder; else empty.

    Raises: ConfigError for an unknown task.
    """
    name, _, task = source.partition(":")
    if Path(name).name != "glue":
        return ()
    return find_glue_task(task).hub_texts


def _refuse_prepared(folder: Path) -> None:
    """Checks the folder, because `datasets` would read the manifest as rows."""
    if (folder / "manifest.json").is_file() and (folder / "sources").is_dir():
        raise DataError(f"{folder} was written by `evenpack prepare`: give its run file (.yaml)")
