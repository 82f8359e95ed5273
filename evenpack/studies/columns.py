"""Columns of results, declared once: they give a table for people, and the axes of a figure.

    PACKS = Column("packs")
    EFFICIENCY = Column("efficiency", form=".2%", axis="packing efficiency (% of slots)", scale=100.0)
    console.print(table_of(rows, [Column("algorithm"), PACKS, EFFICIENCY], title="Packs of 512 slots"))
    plotting.draw_series(axes, rows, x=PACKS, y=EFFICIENCY)

A value that formats itself by `__format__` (a spread, an interval, a difference) is a column like any number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from evenpack.console import WideTable, table


@dataclass(frozen=True)
class Column:
    """A column of results: the place of its value in a row, its heading and its format."""

    heading: str
    """Heading in a table."""
    value: str | Callable[[Any], Any] = ""
    """Path in a row, as in `quality.displacement` (attributes, or keys of a mapping), or a function of the row.

    Empty: the heading is the path. Where a part of a path is None, so is the value.
    """
    form: str = ""
    """Specification for `format`: `.3f`, `,.4g`, `+.4f`; `.2%` writes 12.34 %. Empty: as the console writes any
    value."""
    scale: float = 1.0
    """Factor from the row's unit to the column's and the axis' one. A form in % needs none."""
    missing: str | None = None
    """Text where there is no value. None: as the console writes None."""
    axis: str = ""
    """Label of an axis, with its unit. Empty: the heading."""

    def of(self, row: Any) -> Any:
        """Returns the row's value in the row's own unit; None if there is none."""
        if callable(self.value):
            return self.value(row)
        found = row
        for name in (self.value or self.heading).split("."):
            if found is None:
                return None
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        return found

    def text(self, row: Any) -> Any:
        """Returns what a table's cell shows: the formatted value, or a value that the console formats."""
        value = self.of(row)
        if value is None:
            return self.missing
        if self.form.endswith("%"):
            return f"{format(value, self.form)[:-1]} %"
        value = value if self.scale == 1.0 else self.scale * value
        return format(value, self.form) if self.form else value

    def numbers(self, rows: Sequence[Any]) -> list[float]:
        """Returns the rows' values in the axis' unit; nan where there is none."""
        values = [self.of(row) for row in rows]
        return [float("nan") if value is None else self.scale * value for value in values]

    @property
    def label(self) -> str:
        """The label of an axis of these values."""
        return self.axis or self.heading


Cells = list[dict[str, Any]]
"""Lines of a table, each by heading."""


def cells(rows: Sequence[Any], columns: Sequence[Column]) -> Cells:
    """Returns a line for each row."""
    return [{column.heading: column.text(row) for column in columns} for row in rows]


def cells_across(lines: Mapping[str, Sequence[Any]], *, heading: Column, value: Column) -> Cells:
    """Returns a line for each name, and in it one value of each of its rows; `heading` names the row's column."""
    return [{"": name, **{str(heading.text(row)): value.text(row) for row in rows}} for name, rows in lines.items()]


def cells_by_column(rows: Sequence[Any], columns: Sequence[Column], *, heading: Column) -> Cells:
    """Returns a line for each column and a column for each row, which `heading` names: few rows of many figures."""
    return [{"": column.heading, **{str(heading.text(row)): column.text(row) for row in rows}} for column in columns]


def table_of(rows: Sequence[Any], columns: Sequence[Column], *, title: str = "") -> Table:
    """Returns a table with a line for each row."""
    return table(cells(rows, columns), title=title)


def wide_table_of(rows: Sequence[Any], columns: Sequence[Column], *, title: str) -> WideTable:
    """Returns a table with a line for each row, whose columns continue below if not all fit."""
    return WideTable(rows=cells(rows, columns), title=title)
