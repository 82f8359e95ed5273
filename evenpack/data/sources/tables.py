"""Tables, read a part at a time: one reader for each format, for corpora of text columns and for tables of lengths.

ParquetTable    by row groups, only the requested columns
CsvTable        .csv, .tsv, with a header row
JsonlTable      one JSON object per line
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from evenpack.data.sources.corpus import encode_text
from evenpack.data.sources.lines import SourceReader, value_of
from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 16
"""Rows of numbers, and of texts that are counted without being kept."""
LONG_ROWS_AT_ONCE = 1 << 10
"""Rows of lists and texts: so many of 4,096 integers are 32 MiB."""
_READ_BYTES = 1 << 20
"""Bytes of a column read at once, so that a row group of any size takes the memory of a few pages."""
_LONG_BYTES_AT_ONCE = 1 << 23
"""Bytes of lists and texts at once, where `LONG_ROWS_AT_ONCE` of them would be more."""
_CSV_BLOCK_BYTES = 1 << 24
"""Bytes of a block, which limit the length of a row."""
_JSONL_BLOCK_BYTES = 1 << 20
"""Bytes of lines gathered into one part."""
_INTEGER = "^-?[0-9]{1,18}$"
_KINDS: dict[type, str] = {int: "a number", float: "a number", list: "a list", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some consecutive rows."""

    columns: tuple[Any, ...]
    """One `pyarrow.Array` for each requested column."""
    place: Callable[[int], str]
    """Describes the position of the n-th of these rows, for people."""
    bytes_read: int
    """Bytes read of `Table.total_bytes`, including these rows."""


@runtime_checkable
class Table(Protocol):
    """Rows with named columns."""

    @property
    def origin(self) -> str:
        """Name for people."""

    @property
    def schema(self) -> dict[str, Any]:
        """`pyarrow.DataType` of each column, as far as it is known before reading."""

    @property
    def untyped(self) -> bool:
        """True where `schema` is a guess: each column is read as what was asked for when the table was opened."""

    @property
    def total_bytes(self) -> int:
        """The final value of `Rows.bytes_read`."""

    def rows(self, columns: Sequence[str]) -> Iterator[Rows]:
        """Yields all rows of some columns. Raises: DataError."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The rows of a row group, which can be read without the earlier ones."""

    rows: int
    weight: int
    """Stored bytes of the requested columns."""


class ParquetTable:
    """A .parquet file, read by row groups, in slices."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the footer. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        with arrow_errors_as_data_errors(self.origin, "parquet"):
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
            self._schema = self._file.schema_arrow
        metadata = self._file.metadata
        self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]

    @cached_property
    def schema(self) -> dict[str, Any]:
        return {field.name: field.type for field in self._schema}

    def text_column(self, name: str) -> tuple[str]:
        """Returns the column, if it is one of text. Raises: DataError with the existing columns."""
        count = self._schema.names.count(name)
        if count != 1:
            raise DataError(
                f"{self.origin} has {'no column' if count == 0 else f'{count} columns'} '{name}'; existing columns: "
                f"{', '.join(self._schema.names)}. Set the source's text_key"
            )
        found = self._schema.field(name).type
        if not is_text(found):
            raise DataError(
                f"column '{name}' of {self.origin} must be of strings, found {found}. Set the source's text_key"
            )
        return (name,)

    def texts_among(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns those of these columns that exist once and hold texts."""
        return tuple(name for name in names if self._schema.names.count(name) == 1 and is_text(self.schema[name]))

    def blocks(self, columns: Sequence[str]) -> tuple[Block, ...]:
        """Returns all row groups, in order."""
        return tuple(Block(rows=group.num_rows, weight=_stored_bytes(group, columns)) for group in self._groups)

    def rows(self, columns: Sequence[str], *, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """Yields rows from number `start` on, up to `stop`; row groups that hold none of them are not read."""
        count = self._file.metadata.num_rows
        asked = range(start, count if stop is None else stop)
        row = 0
        with arrow_errors_as_data_errors(self.origin, "parquet"):
            for number, group in enumerate(self._groups):
                end = row + group.num_rows
                for batch in self._slices(columns, number) if _overlap(row, group.num_rows, asked) else ():
                    if found := _overlap(row, len(batch), asked):
                        some = batch.slice(found.start - row, len(found))
                        yield Rows(
                            columns=tuple(some.column(name) for name in columns),
                            place=row_namer(self.origin, found.start),
                            bytes_read=self.total_bytes * found.stop // count,
                        )
                    row += len(batch)
                row = end

    def _slices(self, columns: Sequence[str], number: int) -> Iterator[Any]:
        at_once = ROWS_AT_ONCE
        if not all(pa.types.is_primitive(self.schema[name]) for name in columns):
            mean_bytes = int(self._groups[number].total_byte_size) // int(self._groups[number].num_rows)
            at_once = min(LONG_ROWS_AT_ONCE, max(1, _LONG_BYTES_AT_ONCE // max(1, mean_bytes)))
        yield from self._file.iter_batches(at_once, columns=list(columns), row_groups=[number])


def _stored_bytes(group: Any, columns: Sequence[str]) -> int:
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(int(chunk.total_compressed_size) for chunk in chunks if chunk.path_in_schema in columns)


def _overlap(first: int, count: int, asked: range) -> range:
    """Returns the requested ones of the `count` rows from number `first` on."""
    return range(max(first, asked.start), min(first + count, asked.stop))


def is_text(type_: Any) -> bool:
    """Returns whether values of an Arrow type are strings, directly or through a dictionary."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def row_namer(origin: str, first: int) -> Callable[[int], str]:
    """Returns `Rows.place` of rows that begin with number `first`."""
    return lambda index: f"{origin}, row {first + index} (from 0)"


@contextmanager
def arrow_errors_as_data_errors(origin: str, format_name: str) -> Iterator[None]:
    """Turns Arrow's errors in the block into a DataError that names the file."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # Arrow's own for damaged pages
        raise DataError(f"{origin} is not readable as {format_name}: {error}") from error


class CsvTable:
    """A file of comma- or tab-separated values, whose columns are read as text or as integers."""

    untyped = True

    def __init__(self, path: Path, *, as_text: bool) -> None:
        """Reads the beginning. Raises: DataError for an empty file, or one without a header row, or of equal names."""
        self._as_text = as_text
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._path = path
        with path.open("rb") as file, arrow_errors_as_data_errors(self.origin, path.suffix[1:]):
            schema = self._open(file, pyarrow.csv.ConvertOptions(), empty_lines=False).schema
            self.schema: dict[str, Any] = {field.name: field.type for field in schema}  # whose names may be no UTF-8
        twice = [name for name in self.schema if schema.names.count(name) > 1]
        if twice:
            raise DataError(f"{path} has {schema.names.count(twice[0])} columns '{twice[0]}': rename all but one")
        if all(name.strip().isdecimal() for name in self.schema):
            raise DataError(
                f"{path} begins with the numbers {', '.join(self.schema)} where a header row was expected: "
                "write one, or call the file .txt if it holds bare lengths"
            )

    def rows(self, columns: Sequence[str]) -> Iterator[Rows]:
        options = pyarrow.csv.ConvertOptions(
            include_columns=list(columns),
            column_types={name: pa.string() for name in columns},
            strings_can_be_null=False,
        )
        done = 0
        with self._path.open("rb") as file, arrow_errors_as_data_errors(self.origin, self._path.suffix[1:]):
            # With one column an empty line is a missing value; otherwise it is not a row.
            for batch in self._open(file, options, empty_lines=len(self.schema) == 1):
                place = row_namer(self.origin, done)
                done += len(batch)
                found = batch.columns if self._as_text else [_to_integers(column, place) for column in batch.columns]
                yield Rows(columns=tuple(found), place=place, bytes_read=file.tell())

    def _open(self, file: Any, convert: Any, *, empty_lines: bool) -> Any:
        return pyarrow.csv.open_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter="\t" if self._path.suffix == ".tsv" else ",",
                newlines_in_values=True,
                ignore_empty_lines=not empty_lines,
            ),
            convert_options=convert,
        )


def _to_integers(texts: Any, place: Callable[[int], str]) -> Any:
    """Returns cells as int64; an empty one is null. Raises: DataError with the first that is not decimal digits."""
    trimmed = pc.utf8_trim_whitespace(texts)
    trimmed = pc.if_else(pc.equal(trimmed, ""), None, trimmed)
    wrong = pc.index(pc.match_substring_regex(trimmed, _INTEGER), False).as_py()
    if wrong >= 0:
        raise DataError(
            f"{place(wrong)}: expected a whole number, found '{trimmed[wrong].as_py()[:40]}'; a column of text needs "
            "--tokenizer"
        )
    return pc.cast(trimmed, pa.int64())


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

    def rows(self, columns: Sequence[str]) -> Iterator[Rows]:
        kinds: dict[str, str] = {}
        with SourceReader(self._path) as reader:
            gathered: list[tuple[int, list[Any]]] = []
            block_bytes = 0
            for value in _objects(reader):
                gathered.append((reader.line_number, [_cell(value, name, kinds, reader.where) for name in columns]))
                block_bytes += reader.line_bytes
                if block_bytes >= _JSONL_BLOCK_BYTES:
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
    return (reader.json_object(line) for line in reader.filled_lines())


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
    if isinstance(cell, list) and any(isinstance(one, list) for one in cell[:1]):
        raise DataError(
            f"{where}: '{name}' holds lists in a list: expected integers, lists of no further lists, or text"
        )
    return len(cell) if isinstance(cell, list) else cell


def _type_of(value: Any) -> Any:
    if isinstance(value, list):
        return pa.list_(pa.null())
    return pa.struct([]) if isinstance(value, dict) else pa.infer_type([value])
