"""Tables, read a part at a time: by corpora, which take a column of text, and by `inspect`, which takes lengths.

parquet.py    by row groups, the columns asked for alone
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
