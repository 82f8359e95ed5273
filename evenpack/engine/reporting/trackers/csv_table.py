"""Writes OUTPUT_DIR/metrics.csv: a line for each step, a column for each number."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO

from evenpack.engine.reporting.definitions import scalars
from evenpack.engine.reporting.trackers.tracker import RunLog
from evenpack.files import atomic_open

CSV_TABLE = "metrics.csv"

_STEP = "step"

Row = Mapping[str, int | float | str]


class CsvTable:
    """Writes the table from metrics.jsonl when a run begins or resumes, and then a line for each step."""

    def __init__(self, log: RunLog) -> None:
        self._path = log.output_dir / CSV_TABLE
        self._columns = [_STEP]
        self._replace([{_STEP: record["step"], **scalars(record)} for record in log.records()])

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        row = {_STEP: step, **values}
        if not row.keys() <= set(self._columns):  # the first evaluation adds columns
            with self._path.open(newline="", encoding="utf-8") as file:
                rows: list[Row] = list(csv.DictReader(file))
            self._file.close()
            self._replace([*rows, row])
        else:
            self._file.write(_lines(self._columns, [row]))

    def flush(self) -> None:
        """Does nothing: each line is written at once."""

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _replace(self, rows: Sequence[Row]) -> None:
        """Writes the whole table, with a column for each name in any row, and opens it for appending."""
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        with atomic_open(self._path) as file:
            file.write(_lines(self._columns, [{name: name for name in self._columns}, *rows]))
        self._file = self._path.open("ab", buffering=0)


def _lines(columns: Sequence[str], rows: Iterable[Row]) -> bytes:
    text = StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
