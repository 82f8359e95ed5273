"""Comma- and tab-separated values as tables."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from evenpack.data.sources.tables import Rows, arrow_errors_as_data_errors, row_namer
from evenpack.errors import DataError

_CSV_BLOCK_BYTES = 1 << 24
"""Bytes of a block, which limit the length of a row."""


class CsvTable:
    """A file of comma- or tab-separated values."""

    untyped = True

    def __init__(self, path: Path) -> None:
        """Reads the beginning. Raises: DataError for an empty file, or one without a header row."""
        self.origin = str(path)
        self.total_bytes = path.stat().st_size
        self._path = path
        with path.open("rb") as file, arrow_errors_as_data_errors(self.origin, path.suffix[1:]):
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
        with self._path.open("rb") as file, arrow_errors_as_data_errors(self.origin, self._path.suffix[1:]):
            # With one column an empty line is a missing value; otherwise it is not a row.
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


def _to_integers(texts: Any, place: Callable[[int], str]) -> Any:
    """Returns cells as int64; an empty one is null. Raises: DataError with the first that is not an integer."""
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
    """Converts decimals. Raises: pa.ArrowInvalid for a text that is not an integer in decimal digits."""
    if pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
        raise pa.ArrowInvalid("Arrow would take 0x10 for 16")
    return pc.cast(texts, pa.int64())
