"""Parquet files as tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from evenpack.data.sources.tables import LONG_ROWS_AT_ONCE, ROWS_AT_ONCE, Rows, row_namer, telling_arrow_errors
from evenpack.errors import DataError


class ParquetTable:
    """A .parquet file."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the footer. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        with telling_arrow_errors(self.origin, "parquet"):
            self._file = pyarrow.parquet.ParquetFile(path)
        self.schema: dict[str, Any] = {field.name: field.type for field in self._file.schema_arrow}
        self.count = int(self._file.metadata.num_rows)

    def text_column(self, name: str) -> tuple[str]:
        """The column, if it is one of text. Raises: DataError with the columns there are."""
        if name not in self.schema:
            raise DataError(
                f"{self.origin} has no column '{name}'; the columns there are: {', '.join(self.schema)}. "
                "Set the source's text_key"
            )
        if not (pa.types.is_string(self.schema[name]) or pa.types.is_large_string(self.schema[name])):
            raise DataError(f"column '{name}' of {self.origin} must be of strings, found {self.schema[name]}")
        return (name,)

    def rows(self, columns: Sequence[str], *, as_text: bool, start: int = 0) -> Iterator[Rows]:
        """From row `start` on; row groups before it are not read."""
        at_once = (
            ROWS_AT_ONCE if all(pa.types.is_primitive(self.schema[name]) for name in columns) else LONG_ROWS_AT_ONCE
        )
        groups, done = self._groups_from(start)
        with telling_arrow_errors(self.origin, "parquet"):
            for whole in self._file.iter_batches(at_once, columns=list(columns), row_groups=groups):
                batch = whole.slice(max(0, start - done))
                first, done = done + len(whole) - len(batch), done + len(whole)
                if len(batch):
                    yield Rows(
                        columns=tuple(batch.column(name) for name in columns),
                        place=row_namer(self.origin, first),
                        bytes_read=self.total_bytes * done // self.count,
                    )

    def _groups_from(self, start: int) -> tuple[list[int], int]:
        """The row groups that hold row `start` and what follows, and the rows before them."""
        before, metadata = 0, self._file.metadata
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if before + rows > start:
                return list(range(group, metadata.num_row_groups)), before
            before += rows
        return [], before
