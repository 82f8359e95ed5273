"""Output of the command line: tables and errors for people, or one JSON document for programs.

Results go to standard output, everything else to standard error.
"""

import dataclasses
import errno
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from evenpack.files import write_json
from evenpack.units import visible

_FILE_COLUMNS = 160
"""Width of tables where the output is not a terminal."""

_COLUMN_GAP = 2


@dataclasses.dataclass
class Report:
    """The result of a command."""

    value: Any = None
    """Value for --json."""
    shown: list[Any] = dataclasses.field(default_factory=list)
    """Objects for people, which rich can print."""
    is_silent: bool = False
    """Whether another rank prints the result."""
    unmet: str | None = None
    """The request besides the result that was not possible: the result is printed, and the command fails."""
    exit_code: int = 0
    """Exit code of a command whose result is printed, and not final (`EXIT_STOPPED`) or not as it should be."""

    def show(self) -> None:
        """Prints the tables on standard output."""
        print_apart(self.shown)


def results() -> Console:
    """Returns standard output, for results."""
    return _console(sys.stdout.isatty())


def messages() -> Console:
    """Returns standard error, for everything else."""
    return _console(sys.stderr.isatty(), stderr=True)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr(*, prefix: str = "", level: int = logging.INFO) -> None:
    """Shows the log messages of evenpack in this process, from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter(f"{prefix}%(message)s"))
    logger = logging.getLogger("evenpack")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


def print_json(value: Any) -> None:
    """Prints one document. Dataclasses and sections are objects, paths strings; a number that is not finite is null."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def save_json(value: Any, path: Path, *, check: Callable[[], None] | None = None) -> None:
    """Writes the document of `print_json` into a file, atomically; `check` as in `files.atomic_path`."""
    write_json(path, plain(value), check=check)


def plain(value: Any) -> Any:
    """Returns the value as JSON has it: dataclasses and sections as objects, no number that is not finite."""
    if value is None or isinstance(value, str | int | float):  # first, as nearly all values of records are of these
        return None if isinstance(value, float) and not math.isfinite(value) else value

    from pydantic import BaseModel  # slow to import, and help texts do not need it

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        inners = [value.start, value.stop] if isinstance(value, range) else value
        return [plain(inner) for inner in inners]
    return str(value) if isinstance(value, Path) else value


def print_apart(results_shown: Sequence[RenderableType]) -> None:
    """Prints results with an empty line between two of them."""
    console = results()
    for index, shown in enumerate(results_shown):
        if index:
            console.print()
        console.print(shown, soft_wrap=isinstance(shown, Text))  # so that a command can be copied in one piece


def print_error(message: str) -> None:
    """Prints an error that the user can correct."""
    messages().print(Text.assemble(("error: ", "bold red"), visible(message)), soft_wrap=True)


def table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Table:
    """Returns a table with one column for each key of the first row: text to the left, numbers to the right."""
    shown = _plain_table(title)
    for name, value in (rows[0] if rows else {}).items():
        is_text = isinstance(value, str) and not value[:1].isdigit()
        shown.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row.values()))
    return shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideTable:
    """A table whose columns continue below if not all fit; the first column is repeated."""

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
    """Returns a table of names and values, one below another."""
    shown = _plain_table(title, show_header=False)
    shown.add_column(style="dim")
    shown.add_column(overflow="fold")
    for name, value in values.items():
        shown.add_row(name, _cell(value))
    return shown


def text(message: str, *, bold: bool = False) -> Text:
    """Returns one or several lines without markup."""
    return Text(visible(message), style="bold" if bold else "")


def percent(share: float) -> str:
    """Returns a percentage with two decimals: packings differ in the second."""
    return f"{100 * share:.2f} %"


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Renders the strings that are printed, cells and titles of tables among them, without control characters."""
        return super().render_str(visible(text), **options)

    def on_broken_pipe(self) -> None:
        """Leaves the error to who prints; rich would end the process with exit code 1."""
        raise BrokenPipeError(errno.EPIPE, "the reader has gone")


def _console(is_terminal: bool, *, stderr: bool = False) -> Console:
    width = None if is_terminal else _FILE_COLUMNS
    # Set explicitly: an environment variable for colours would put escape codes and bars into log files.
    return _Console(stderr=stderr, highlight=False, markup=False, width=width, force_terminal=is_terminal)


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
