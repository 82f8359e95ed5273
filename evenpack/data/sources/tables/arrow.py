"""Arrow's own format as tables: streams (`datasets` writes these) and files with a footer (Feather is one)."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from evenpack.data.sources.tables import (
    LONG_ROWS_AT_ONCE,
    Block,
    Rows,
    arrow_errors_as_data_errors,
    only_text_column,
    overlap,
    row_namer,
)
from evenpack.errors import DataError

_FOOTER_MAGIC = b"ARROW1"
_MESSAGE = b"\xff\xff\xff\xff"
"""The bytes that begin every message of a stream since Arrow 0.15."""
_END_OF_STREAM = _MESSAGE + b"\0\0\0\0"


class ArrowTable:
    """A file of record batches, mapped into memory: skipped batches are not read, unless they are compressed."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the schema. Raises: DataError if there is none, or if a stream has no end."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._has_footer = _begins_with(path, _FOOTER_MAGIC)
        with arrow_errors_as_data_errors(self.origin, "Arrow"), pa.memory_map(self.origin) as source:
            self._schema = self._reader(source).schema
        if _begins_with(path, _MESSAGE):
            _require_end(path)
        self.schema: dict[str, Any] = {field.name: field.type for field in self._schema}

    def text_column(self, name: str) -> tuple[str]:
        return only_text_column(self.origin, self._schema, name)

    def blocks(self, columns: Sequence[str]) -> tuple[Block, ...]:
        """Returns the record batches."""
        return tuple(Block(rows=len(batch), weight=batch.nbytes) for batch, _ in self._batches(columns, 0))

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
        """Yields a record batch in slices, which are copied only if it is compressed."""
        for batch, bytes_read in self._batches(columns, first_block):
            found = overlap(first_row, len(batch), range(start, first_row + len(batch) if stop is None else stop))
            for begin in found[::LONG_ROWS_AT_ONCE]:
                some = batch.slice(begin - first_row, min(LONG_ROWS_AT_ONCE, found.stop - begin))
                yield Rows(
                    columns=tuple(self._checked(some.column(name)) for name in columns),
                    place=row_namer(self.origin, begin),
                    bytes_read=bytes_read,
                )
            first_row += len(batch)
            if stop is not None and first_row >= stop:
                return

    def _batches(self, columns: Sequence[str], first: int) -> Iterator[tuple[Any, int]]:
        """Yields record batches from number `first` on, each with the bytes of the file that are read then."""
        fields = [self._schema.get_field_index(name) for name in columns]
        with arrow_errors_as_data_errors(self.origin, "Arrow"), pa.memory_map(self.origin) as source:
            reader = self._reader(source, pyarrow.ipc.IpcReadOptions(included_fields=fields))
            if self._has_footer:
                count = reader.num_record_batches
                yield from ((reader.get_batch(n), self.total_bytes * (n + 1) // count) for n in range(first, count))
            else:
                yield from ((batch, source.tell()) for batch in islice(reader, first, None))

    def _reader(self, source: Any, options: Any = None) -> Any:
        return (pyarrow.ipc.open_file if self._has_footer else pyarrow.ipc.open_stream)(source, options=options)

    def _checked(self, values: Any) -> Any:
        """Checks offsets. Raises: DataError if they lead out of the file, where Arrow would follow them."""
        with arrow_errors_as_data_errors(self.origin, "Arrow"):
            _as_bytes(values).validate(full=True)
        return values


def _as_bytes(values: Any) -> Any:
    """Returns strings as bytes. The caller, who knows the row, checks one by one that they are UTF-8."""
    type_ = values.type
    if pa.types.is_dictionary(type_):
        return pa.DictionaryArray.from_arrays(values.indices, _as_bytes(values.dictionary), safe=False)
    if pa.types.is_string_view(type_):
        return values.view(pa.binary_view())
    if pa.types.is_large_string(type_):
        return values.view(pa.large_binary())
    return values.view(pa.binary()) if pa.types.is_string(type_) else values


def _begins_with(path: Path, expected: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(expected)) == expected


def _require_end(path: Path) -> None:
    """Checks the end. Raises: DataError if a stream was cut off after a record batch, which Arrow would not notice."""
    with path.open("rb") as file:
        file.seek(-len(_END_OF_STREAM), 2)
        if file.read() != _END_OF_STREAM:
            raise DataError(
                f"{path} does not end in the mark that closes an Arrow stream: it is truncated, or its writer was "
                "interrupted; write it again"
            )
