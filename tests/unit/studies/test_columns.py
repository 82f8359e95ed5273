"""A column that is declared once, in a table and on an axis."""

import math
from dataclasses import dataclass

from evenpack.studies.columns import Column, cells, cells_across, cells_by_column


@dataclass(frozen=True)
class _Inner:
    share: float


@dataclass(frozen=True)
class _Row:
    name: str
    packs: int
    seconds: float
    inner: _Inner | None


ROWS = (_Row("a", 12_345, 0.0021, _Inner(0.98765)), _Row("b", 7, 1.0, None))
NAME, PACKS = Column("name"), Column("packs")
MILLISECONDS = Column("ms", "seconds", ".1f", scale=1e3, axis="time (ms)")
SHARE = Column("share", "inner.share", ".2%", scale=100.0, missing="none")


def test_a_row_is_written_by_its_columns() -> None:
    first, second = cells(ROWS, [NAME, PACKS, MILLISECONDS, SHARE, Column("twice", lambda row: 2 * row.packs)])
    assert first == {"name": "a", "packs": 12_345, "ms": "2.1", "share": "98.77 %", "twice": 24_690}
    assert second["share"] == "none", "there is no inner value"


def test_mappings_are_rows_as_objects_are() -> None:
    assert cells([{"name": "a", "inner": {"share": 0.5}}], [NAME, SHARE]) == [{"name": "a", "share": "50.00 %"}]


def test_an_axis_has_the_unit_of_the_column() -> None:
    assert MILLISECONDS.numbers(ROWS) == [2.1, 1000.0]
    assert (MILLISECONDS.label, PACKS.label) == ("time (ms)", "packs")
    assert math.isnan(SHARE.numbers(ROWS)[1]), "no value is a gap in a line"


def test_rows_may_be_columns() -> None:
    assert cells_by_column(ROWS, [MILLISECONDS], heading=NAME) == [{"": "ms", "a": "2.1", "b": "1000.0"}]
    assert cells_across({"line": ROWS}, heading=NAME, value=PACKS) == [{"": "line", "a": 12_345, "b": 7}]
