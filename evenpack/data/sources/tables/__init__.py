"""Tables, read a part at a time: by corpora, which take a column of text, and by `inspect`, which takes lengths.

parquet.py    by row groups, the columns asked for alone
arrow.py      by record batches, mapped into memory: streams, and files with a footer
csv.py        .csv, .tsv, with a header row
jsonl.py      a JSON object a line
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 16
"""Of numbers and of texts that are counted without being kept."""

LONG_ROWS_AT_ONCE = 1 << 10
"""Of lists and texts: as many of 4,096 integers are 32 MiB."""


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


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows that a file keeps together, and which can be read without those before them."""

    rows: int
    weight: int
    """Bytes of the columns asked for, stored or in memory: in proportion to those of the file's other blocks."""


@runtime_checkable
class BlockTable(Table, Protocol):
    """A table whose rows lie in blocks and have types that are known beforehand."""

    def blocks(self, columns: Sequence[str]) -> tuple[Block, ...]:
        """All of them, in order. Raises: DataError."""

    def text_column(self, name: str) -> tuple[str]:
        """The column, if it is one of text. Raises: DataError with what there is."""

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
        """Rows from number `start` on, up to `stop`; blocks that hold none of them are not read.

        Blocks before `first_block`, with which row `first_row` begins, are not even counted.
        """


def is_text(type_: Any) -> bool:
    """Whether values of an Arrow type are strings, be it by way of a dictionary."""
    if pa.types.is_dictionary(type_):
        return is_text(type_.value_type)
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def only_text_column(origin: str, schema: Any, name: str) -> tuple[str]:
    """The column of a `pyarrow.Schema`, if it is one of text. Raises: DataError with the columns there are."""
    count = schema.names.count(name)
    if count != 1:
        raise DataError(
            f"{origin} has {'no column' if count == 0 else f'{count} columns'} '{name}'; the columns there are: "
            f"{', '.join(schema.names)}. Set the source's text_key"
        )
    found = schema.field(name).type
    if not is_text(found):
        raise DataError(f"column '{name}' of {origin} must be of strings, found {found}. Set the source's text_key")
    return (name,)


def overlap(first: int, count: int, asked: range) -> range:
    """Those of the `count` rows from number `first` on that are asked for."""
    return range(max(first, asked.start), min(first + count, asked.stop))


def row_namer(origin: str, first: int) -> Callable[[int], str]:
    """`Rows.place` of rows that begin with number `first`."""
    return lambda index: f"{origin}, row {first + index} (from 0)"


@contextmanager
def telling_arrow_errors(origin: str, format_name: str) -> Iterator[None]:
    """Raises: DataError naming the file for what Arrow raises in the block."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:  # Arrow's own for damaged pages
        raise DataError(f"{origin} is not readable as {format_name}: {error}") from error
