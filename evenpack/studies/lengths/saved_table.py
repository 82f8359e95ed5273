"""Folders written by `datasets` with `save_to_disk` as tables, through the reader of sources."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenpack.data.sources.files import saved_files, saved_splits
from evenpack.data.sources.tables import ArrowTable, Rows
from evenpack.errors import DataError


class SavedTable:
    """The files of a saved dataset, or of one of its splits, in order."""

    untyped = False

    def __init__(self, folder: Path, split: str | None) -> None:
        """Opens a folder; of several splits `train` is the default. Raises: DataError if there is nothing to read."""
        chosen = split or ("train" if saved_splits(folder) else None)
        files = saved_files(folder, split=chosen, key="--split")
        if not files:
            raise DataError(f"{folder} lists no file: the data set is empty")
        self.origin = f"{folder}, {chosen}" if chosen else str(folder)
        self._tables = [ArrowTable(path) for path in files]
        self.schema: dict[str, Any] = self._tables[0].schema
        self.total_bytes = sum(table.total_bytes for table in self._tables)

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        bytes_before = 0
        for table in self._tables:
            for rows in table.rows(columns, as_text=as_text):
                yield replace(rows, bytes_read=bytes_before + rows.bytes_read)
            bytes_before += table.total_bytes
