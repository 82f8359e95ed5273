"""Tables, read a part at a time.

    ParquetTable    by row groups, the columns asked for alone
    CsvTable        .csv, .tsv, with a header row

Lines of JSON and datasets are in `jsonl_table.py` and `dataset_table.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 16
"""Of numbers and of texts that are counted without being kept."""

LONG_ROWS_AT_ONCE = 1 << 10
"""Of lists and texts: as many of 4,096 integers are 32 MiB."""

_CSV_BLOCK_BYTES = 1 << 24
"""No row may be longer."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows one after another."""

    columns: tuple[Any, ...]
    """One `pyarrow.Array` for each column that was asked for."""
    place: Callable[[int], str]
    """Where the n-th of these rows stands, for people."""
    bytes_read: int
    """Of `Table.total_bytes`, these rows included."""


@runtime_checkable
class Table(Protocol):
    """Rows with named columns."""

    @property
    def origin(self) -> str:
        """Its name, for people."""

    @property
    def schema(self) -> dict[str, Any]:
        """The `pyarrow.DataType` of each column, as far as it is known before reading."""

    @property
    def untyped(self) -> bool:
        """True where `schema` is a guess and each column can be read as numbers or as text."""

    @property
    def total_bytes(self) -> int:
        """What `Rows.bytes_read` comes to."""

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        """All rows of some columns; an `untyped` table's `as_text` or as integers. Raises: DataError."""


class ParquetTable:
    """A .parquet file."""

    untyped = False

    def __init__(self, path: Path) -> None:
        """Reads the footer. Raises: DataError if there is none."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        with _telling_arrow_errors(self.origin, "parquet"):
            self._file = pyarrow.parquet.ParquetFile(path)
        self.schema: dict[str, Any] = {field.name: field.type for field in self._file.schema_arrow}

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        at_once = (
            ROWS_AT_ONCE if all(pa.types.is_primitive(self.schema[name]) for name in columns) else LONG_ROWS_AT_ONCE
        )
        done, count = 0, self._file.metadata.num_rows
        with _telling_arrow_errors(self.origin, "parquet"):
            for batch in self._file.iter_batches(at_once, columns=list(columns)):
                first, done = done, done + len(batch)
                yield Rows(
                    columns=tuple(batch.column(name) for name in columns),
                    place=row_namer(self.origin, first),
                    bytes_read=self.total_bytes * done // count,
                )


class CsvTable:
    """A file of comma- or tab-separated values."""

    untyped = True

    def __init__(self, path: Path) -> None:
        """Reads the beginning. Raises: DataError for an empty file, or one without a header row."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._path = path
        with path.open("rb") as file, _telling_arrow_errors(self.origin, path.suffix[1:]):
            schema = self._open(file, pyarrow.csv.ConvertOptions(), empty_lines=False).schema
        self.schema: dict[str, Any] = {field.name: field.type for field in schema}
        if all(name.strip().isdecimal() for name in self.schema):
            raise DataError(
                f"{path} begins with the numbers {', '.join(self.schema)} where a header row was expected: "
                "write one, or call the file .txt if it holds bare lengths"
            )

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        options = pyarrow.csv.ConvertOptions(
            include_columns=list(columns),
            column_types={name: pa.string() for name in columns},
            strings_can_be_null=False,
        )
        done = 0
        with self._path.open("rb") as file, _telling_arrow_errors(self.origin, self._path.suffix[1:]):
            # Where there is one column an empty line is a value that is missing; elsewhere it is no row.
            for batch in self._open(file, options, empty_lines=len(self.schema) == 1):
                place = row_namer(self.origin, done)
                done += len(batch)
                found = batch.columns if as_text else [_to_integers(column, place) for column in batch.columns]
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


def row_namer(origin: str, first: int) -> Callable[[int], str]:
    """`Rows.place` of rows that begin with number `first`."""
    return lambda index: f"{origin}, row {first + index} (from 0)"


def _to_integers(texts: Any, place: Callable[[int], str]) -> Any:
    """Cells as int64; an empty one is null. Raises: DataError with the first that is no integer."""
    trimmed = pc.utf8_trim_whitespace(texts)
    trimmed = pc.if_else(pc.equal(trimmed, ""), None, trimmed)
    try:
        return _cast_decimal(trimmed)
    except pa.ArrowInvalid:
        for index, text in enumerate(trimmed.to_pylist()):
            try:
                _cast_decimal(pa.array([text], pa.string()))
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"{place(index)}: expected a whole number, found '{text[:40]}'; a column of text needs --tokenizer"
                ) from error
        raise


def _cast_decimal(texts: Any) -> Any:
    """Raises: pa.ArrowInvalid for what is no integer in decimal digits."""
    if pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
        raise pa.ArrowInvalid("Arrow would take 0x10 for 16")
    return pc.cast(texts, pa.int64())


@contextmanager
def _telling_arrow_errors(origin: str, format_name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{origin} is not readable as {format_name}: {error}") from error
