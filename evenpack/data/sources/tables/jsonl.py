"""Lines of JSON objects as a table; a line that lacks a key, or has another type than the first, is named."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from evenpack.data.sources.corpus import encode_text
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.json_lines import filled_lines, value_of
from evenpack.data.sources.tables import Rows
from evenpack.errors import DataError

_BLOCK_BYTES = 1 << 20
"""Bytes of lines gathered into one part."""

_KINDS: dict[type, str] = {int: "a number", float: "a number", list: "a list", str: "text"}


class JsonlTable:
    """A .jsonl file, compressed (.zst, .gz) or not. Lines of white space are skipped."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the first object. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._path = path
        with SourceReader(path) as reader:
            first = next(_objects(reader), None)
        if first is None:
            raise DataError(f"{path} holds no line: it is empty")
        self.schema: dict[str, Any] = {key: _type_of(value) for key, value in first.items()}

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        kinds: dict[str, str] = {}
        with SourceReader(self._path) as reader:
            gathered: list[tuple[int, list[Any]]] = []
            block_bytes = 0
            for value in _objects(reader):
                gathered.append((reader.line_number, [_cell(value, name, kinds, reader.where) for name in columns]))
                block_bytes += reader.line_bytes
                if block_bytes >= _BLOCK_BYTES:
                    yield self._rows(gathered, reader.bytes_read)
                    gathered, block_bytes = [], 0
            if gathered:
                yield self._rows(gathered, reader.bytes_read)

    def _rows(self, gathered: list[tuple[int, list[Any]]], bytes_read: int) -> Rows:
        columns = zip(*(cells for _, cells in gathered), strict=True)
        return Rows(
            columns=tuple(pa.array(column) for column in columns),
            place=lambda index: f"{self.origin}, line {gathered[index][0]}",
            bytes_read=bytes_read,
        )


def _objects(reader: SourceReader) -> Iterator[dict[str, Any]]:
    return (reader.json_object(line) for line in filled_lines(reader))


def _cell(value: dict[str, Any], name: str, kinds: dict[str, str], where: str) -> Any:
    """Returns the value under `name`, or the length of a list. `kinds` stores the type in the first line."""
    cell = value_of(value, name, where, remedy="Choose with --column")
    if cell is None:
        return None
    kind = _KINDS.get(type(cell), type(cell).__name__)
    expected = kinds.setdefault(name, kind)
    if kind != expected:
        raise DataError(f"{where}: '{name}' is {expected} in the lines before, here it is {kind}")
    if isinstance(cell, int) and not -(1 << 63) <= cell < 1 << 63:
        raise DataError(f"{where}: '{name}' is {cell}: too large for a length")
    if isinstance(cell, str) and not cell.isascii():
        encode_text(cell, lambda: where)
    return len(cell) if isinstance(cell, list) else cell


def _type_of(value: Any) -> Any:
    if isinstance(value, list):
        return pa.list_(pa.null())
    return pa.struct([]) if isinstance(value, dict) else pa.infer_type([value])
