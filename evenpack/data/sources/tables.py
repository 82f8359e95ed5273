"""Tables, read a part at a time: one reader for each format, for corpora of text columns and for tables of lengths.

ParquetTable    by row groups, only the requested columns
StreamedTable   .csv and .tsv with a header row, .jsonl, block by block
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from backports import zstd

from evenpack.data.sources.lines import decompressed, is_compressed
from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 16
"""Rows of numbers, and of texts that are counted without being kept."""
LONG_ROWS_AT_ONCE = 1 << 10
"""Rows of lists and texts: so many of 4,096 integers are 32 MiB."""
_READ_BYTES = 1 << 20
"""Bytes of a column read at once, so that a row group of any size takes the memory of a few pages."""
_LONG_BYTES_AT_ONCE = 1 << 23
"""Bytes of lists and texts at once, where `LONG_ROWS_AT_ONCE` of them would be more."""
_BLOCK_BYTES = 1 << 24
"""Bytes of a block of a .csv or .jsonl file, which limit the length of a row."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some consecutive rows."""

    columns: tuple[Any, ...]
    """One `pyarrow.Array` for each requested column."""
    place: Callable[[int], str]
    """Describes the position of the n-th of these rows, for people."""
    bytes_read: int
    """Bytes read of the table's `total_bytes`, including these rows."""


class ParquetTable:
    """A .parquet file, read by row groups, in slices."""

    def __init__(self, path: Path) -> None:
        """Reads the footer. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        with arrow_errors_as_data_errors(self.origin, "parquet"):
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False)
            self._schema = self._file.schema_arrow
        self.schema: dict[str, Any] = {field.name: field.type for field in self._schema}
        metadata = self._file.metadata
        self.row_count = int(metadata.num_rows)
        self._groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]

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

    def row_groups(self, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yields the rows of each row group, and the stored bytes of these columns."""
        for group in self._groups:
            chunks = (group.column(index) for index in range(group.num_columns))
            yield group.num_rows, sum(one.total_compressed_size for one in chunks if one.path_in_schema in columns)

    def rows(self, columns: Sequence[str], *, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """Yields rows from number `start` on, up to `stop`; row groups that hold none of them are not read."""
        asked = range(start, self.row_count if stop is None else stop)
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
                            bytes_read=self.total_bytes * found.stop // self.row_count,
                        )
                    row += len(batch)
                row = end

    def _slices(self, columns: Sequence[str], number: int) -> Iterator[Any]:
        at_once = ROWS_AT_ONCE
        if not all(pa.types.is_primitive(self.schema[name]) for name in columns):
            mean_bytes = int(self._groups[number].total_byte_size) // int(self._groups[number].num_rows)
            at_once = min(LONG_ROWS_AT_ONCE, max(1, _LONG_BYTES_AT_ONCE // max(1, mean_bytes)))
        yield from self._file.iter_batches(at_once, columns=list(columns), row_groups=[number])


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
    """Turns errors of Arrow (OSError: a damaged page) and decompression into a DataError that names the file."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        raise DataError(f"{origin} is not readable as {format_name}: {error}") from error


class StreamedTable:
    """A .csv, .tsv or .jsonl file, whose first block decides the columns and their types; a later other one is refused.

    A .jsonl file may be compressed (.zst, .gz).
    """

    def __init__(self, path: Path) -> None:
        """Reads the first block. Raises: DataError for an empty file, one without a header row, or of equal names."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._path = path
        self._is_csv = path.suffix in (".csv", ".tsv")
        with self._opened() as (reader, _):
            names = reader.schema.names
            self.schema: dict[str, Any] = {field.name: field.type for field in reader.schema}
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path} has {names.count(twice)} columns '{twice}': rename all but one")
        if self._is_csv and all(name.strip().isdecimal() for name in names):
            raise DataError(
                f"{path} begins with the numbers {', '.join(names)} where a header row was expected: "
                "write one, or call the file .txt if it holds bare lengths"
            )

    def rows(self, columns: Sequence[str]) -> Iterator[Rows]:
        done = 0
        with self._opened(columns) as (reader, file):
            for batch in reader:
                batch.validate(full=True)  # texts of JSON may not be UTF-8
                yield Rows(
                    columns=tuple(batch.column(name) for name in columns),
                    place=row_namer(self.origin, done),
                    bytes_read=file.tell(),
                )
                done += len(batch)

    @contextmanager
    def _opened(self, columns: Sequence[str] | None = None) -> Iterator[tuple[Any, IO[bytes]]]:
        """Opens the file for some columns, None: for all of them in the first block."""
        types = {name: self.schema[name] for name in columns or ()}
        form = self._path.suffix[1:] if self._is_csv else "JSON lines"
        with arrow_errors_as_data_errors(self.origin, form), self._path.open("rb") as file:
            if self._is_csv:
                yield (
                    pyarrow.csv.open_csv(
                        file,
                        read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES),
                        parse_options=pyarrow.csv.ParseOptions(
                            delimiter="\t" if self._path.suffix == ".tsv" else ",",
                            newlines_in_values=True,
                            # With one column an empty line is a missing value; otherwise it is not a row.
                            ignore_empty_lines=columns is None or len(self.schema) > 1,
                        ),
                        convert_options=pyarrow.csv.ConvertOptions(include_columns=list(types), column_types=types),
                    ),
                    file,
                )
                return
            stream = decompressed(file, self._path.suffix)[0] if is_compressed(self._path) else file
            schema = {} if columns is None else {"explicit_schema": pa.schema(types)}
            yield (
                pyarrow.json.open_json(
                    pa.PythonFile(stream, mode="r"),
                    read_options=pyarrow.json.ReadOptions(block_size=_BLOCK_BYTES),
                    parse_options=pyarrow.json.ParseOptions(
                        unexpected_field_behavior="infer" if columns is None else "ignore", **schema
                    ),
                ),
                file,
            )


Table = ParquetTable | StreamedTable
