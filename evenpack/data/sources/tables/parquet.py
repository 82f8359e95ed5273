"""Parquet files as tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from evenpack.data.sources.tables import (
    LONG_ROWS_AT_ONCE,
    ROWS_AT_ONCE,
    Block,
    Rows,
    arrow_errors_as_data_errors,
    only_text_column,
    overlap,
    row_namer,
)

_READ_BYTES = 1 << 20
"""Bytes of a column read at once, so that a row group of any size takes the memory of a few pages."""

_LONG_BYTES_AT_ONCE = 1 << 23
"""Bytes of lists and texts at once, where `LONG_ROWS_AT_ONCE` of them would be more."""


class ParquetTable:
    """A .parquet file."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the footer. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        with arrow_errors_as_data_errors(self.origin, "parquet"):
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
            self._schema = self._file.schema_arrow
        self.schema: dict[str, Any] = {field.name: field.type for field in self._schema}
        self.count = int(self._file.metadata.num_rows)

    def text_column(self, name: str) -> tuple[str]:
        return only_text_column(self.origin, self._schema, name)

    def blocks(self, columns: Sequence[str]) -> tuple[Block, ...]:
        """Returns the row groups."""
        groups = (self._file.metadata.row_group(number) for number in range(self._file.metadata.num_row_groups))
        return tuple(Block(rows=group.num_rows, weight=_stored_bytes(group, columns)) for group in groups)

    def rows(
        self,
        columns: Sequence[str],
        *,
        as_text: bool,
        start: int = 0,
        stop: int | None = None,
        first_block: int = 0,
        first_row: int = 0,
    ) -> Iterator[Rows]:
        """Yields a row group in slices."""
        asked = range(start, self.count if stop is None else stop)
        for number in range(first_block, self._file.metadata.num_row_groups):
            count = self._file.metadata.row_group(number).num_rows
            if overlap(first_row, count, asked):
                yield from self._group_rows(columns, number, first_row, asked)
            first_row += count

    def _group_rows(self, columns: Sequence[str], number: int, first: int, asked: range) -> Iterator[Rows]:
        """Yields the requested rows of a row group whose first row is number `first`."""
        with arrow_errors_as_data_errors(self.origin, "parquet"):
            at_once = self._at_once(columns, number)
            for whole in self._file.iter_batches(at_once, columns=list(columns), row_groups=[number]):
                found = overlap(first, len(whole), asked)
                if found:
                    batch = whole.slice(found.start - first, len(found))
                    yield Rows(
                        columns=tuple(batch.column(name) for name in columns),
                        place=row_namer(self.origin, found.start),
                        bytes_read=self.total_bytes * found.stop // self.count,
                    )
                first += len(whole)

    def _at_once(self, columns: Sequence[str], number: int) -> int:
        """Returns the rows of a slice of a row group."""
        if all(pa.types.is_primitive(self.schema[name]) for name in columns):
            return ROWS_AT_ONCE
        group = self._file.metadata.row_group(number)
        mean_bytes = int(group.total_byte_size) // int(group.num_rows)
        return min(LONG_ROWS_AT_ONCE, max(1, _LONG_BYTES_AT_ONCE // max(1, mean_bytes)))


def _stored_bytes(group: Any, columns: Sequence[str]) -> int:
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(int(chunk.total_compressed_size) for chunk in chunks if chunk.path_in_schema in columns)
