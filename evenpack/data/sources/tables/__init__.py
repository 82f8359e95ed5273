"""Tables, read a part at a time: by corpora, which read a text column, and by `inspect`, which reads lengths.

parquet.py    by row groups, only the requested columns
arrow.py      by record batches, mapped into memory: streams, and files with a footer
csv.py        .csv, .tsv, with a header row
jsonl.py      one JSON object per line
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 16
"""Rows of numbers, and of texts that are counted without being kept."""

LONG_ROWS_AT_ONCE = 1 << 10
"""Rows of lists and texts: so many of 4,096 integers are 32 MiB."""


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
        """True where `schema` is a guess and each column can be read as numbers or as text."""

    @property
    def total_bytes(self) -> int:
        """The final value of `Rows.bytes_read`."""

    def rows(self, columns: Sequence[str], *, as_text: bool) -> Iterator[Rows]:
        """Yields all rows of some columns; an `untyped` table's `as_text` or as integers. Raises: DataError."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows that a file stores together, and that can be read without the earlier ones."""

    rows: int
    weight: int
    """Bytes of the requested columns, stored or in memory: in proportion to those of the file's other blocks."""


@runtime_checkable
class BlockTable(Table, Protocol):
    """A table whose rows are in blocks and have types that are known beforehand."""

    def blocks(self, columns: Sequence[str]) -> tuple[Block, ...]:
        """Returns all blocks, in order. Raises: DataError."""

    def text_column(self, name: str) -> tuple[str]:
        """Returns the column, if it is one of text. Raises: DataError with the existing columns."""

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
        """Yields rows from number `start` on, up to `stop`; blocks that hold none of them are not read.

        Blocks before `first_block`, which begins with row `first_row`, are not even counted.
        """


def is_text(type_: Any) -> bool:
    """Returns whether values of an Arrow type are strings, directly or through a dictionary."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def only_text_column(origin: str, schema: Any, name: str) -> tuple[str]:
    """Returns the column of a `pyarrow.Schema`, if it is one of text. Raises: DataError with the existing columns."""
    count = schema.names.count(name)
    if count != 1:
        raise DataError(
            f"{origin} has {'no column' if count == 0 else f'{count} columns'} '{name}'; existing columns: "
            f"{', '.join(schema.names)}. Set the source's text_key"
        )
    found = schema.field(name).type
    if not is_text(found):
        raise DataError(f"column '{name}' of {origin} must be of strings, found {found}. Set the source's text_key")
    return (name,)


def overlap(first: int, count: int, asked: range) -> range:
    """Returns those of the `count` rows from number `first` on that are requested."""
    return range(max(first, asked.start), min(first + count, asked.stop))


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
