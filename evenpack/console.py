"""What a person at the command line sees: tables, errors; or, for programs, one JSON document.

Results go to standard output, everything else to standard error.
"""

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from evenpack.files import write_json

_FILE_COLUMNS = 160
"""Width of tables where there is no terminal to fit."""

_COLUMN_GAP = 2


@dataclasses.dataclass
class Report:
    """What a command has found."""

    value: Any = None
    """For --json."""
    shown: list[Any] = dataclasses.field(default_factory=list)
    """For people: what rich can print."""
    is_silent: bool = False
    """Another rank prints the result."""
    unmet: str | None = None
    """What was asked for beside the result and could not be had: the result is printed, and the command fails."""
    exit_code: int = 0
    """Of a command that has printed its result, and is not at its end (`EXIT_STOPPED`)."""

    def show(self) -> None:
        """Prints the tables on standard output."""
        print_apart(self.shown)

    def take(self, found: "Report") -> None:
        """Becomes what another report is."""
        vars(self).update(vars(found))


def results() -> Console:
    """Standard output, for results."""
    return _console(sys.stdout.isatty())


def messages() -> Console:
    """Standard error, for everything else."""
    return _console(sys.stderr.isatty(), stderr=True)


def log_to_stderr() -> None:
    """Shows what evenpack logs in this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("evenpack")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def print_json(value: Any) -> None:
    """One document. Dataclasses and sections are objects, paths strings; a number that is not finite is null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def save_json(value: Any, path: Path) -> None:
    """What `print_json` prints, into a file, atomically."""
    write_json(path, _plain(value))


def print_apart(results_shown: Sequence[RenderableType]) -> None:
    """Results, an empty line between two of them."""
    console = results()
    for index, shown in enumerate(results_shown):
        if index:
            console.print()
        console.print(shown, soft_wrap=isinstance(shown, Text))  # a command is to be copied in one piece


def print_error(message: str) -> None:
    """What went wrong, by the user's hand."""
    messages().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """One column for each key of the first row: text to the left, numbers to the right."""
    shown = _plain_table(title)
    for name, value in (rows[0] if rows else {}).items():
        is_text = isinstance(value, str) and not value[:1].isdigit()
        shown.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row.values()))
    return shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideTable:
    """A table whose columns go on further down where there is no room for all; the first column is repeated."""

    rows: Sequence[Mapping[str, Any]]
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for part, names in enumerate(self._parts(options.max_width)):
            if part:
                yield ""
            yield table([{name: row.get(name) for name in names} for row in self.rows], title=self._title(part))

    def _title(self, part: int) -> str:
        return f"{self.title} (further columns)" if part else self.title

    def _parts(self, width: int) -> Iterator[list[str]]:
        first, *names = self.rows[0]
        start = room = width - self._column(first)
        part: list[str] = []
        for name in names:
            if part and self._column(name) > room:
                yield [first, *part]
                part, room = [], start
            part.append(name)
            room -= self._column(name)
        yield [first, *part]

    def _column(self, name: str) -> int:
        return max(len(name), *(len(_cell(row.get(name))) for row in self.rows)) + _COLUMN_GAP


def pairs(values: Mapping[str, Any], *, title: str = "") -> Table:
    """A table of names and values, one below another."""
    shown = _plain_table(title, show_header=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for name, value in values.items():
        shown.add_row(name, _cell(value))
    return shown


def text(message: str, *, bold: bool = False) -> Text:
    """A line, or several, as it is."""
    return Text(message, style="bold" if bold else "")


def percent(share: float) -> str:
    """Two decimals: packings differ in the second."""
    return f"{100 * share:.2f} %"


def _console(is_terminal: bool, *, stderr: bool = False) -> Console:
    width = None if is_terminal else _FILE_COLUMNS
    # Said, for else an environment that asks for colours would put escape codes and bars into log files.
    return Console(stderr=stderr, highlight=False, markup=False, width=width, force_terminal=is_terminal)


def _plain_table(title: str, *, show_header: bool = True) -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, _COLUMN_GAP, 0, 0),
        show_header=show_header,
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    from pydantic import BaseModel  # slow to import, and commands that only explain themselves need none of it

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
