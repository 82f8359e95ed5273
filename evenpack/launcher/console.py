"""What a person at the command line sees: tables, progress, errors; or, for programs, one JSON document.

Results go to standard output, everything else to standard error.
"""

import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from evenpack.data.prepare.progress import PrepareState
from evenpack.engine.reporting.metrics import format_duration, format_rate
from evenpack.files import write_json

_FILE_COLUMNS = 160
"""Width of tables where there is no terminal to fit."""

_COLUMN_GAP = 2

_LINE_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""

_STAGES = {
    "tokenizer": "reading for the tokenizer",
    "tokens": "tokenising",
    "pairs": "making pairs",
    "verification": "verifying",
}


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


class PrepareProgress:
    """Shows `prepare` at work: bars on a terminal, elsewhere a line every few seconds. A context manager."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown_at = -math.inf
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._bars: RichProgress | None = None

    def __enter__(self) -> "PrepareProgress":
        if self._console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}")]
            self._bars = RichProgress(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, state: PrepareState) -> None:
        """A batch is done."""
        if self._bars is not None:
            key = (state.stage, state.source)
            if key not in self._tasks:
                title = f"{state.source}: {_STAGES[state.stage]}"
                self._tasks[key] = self._bars.add_task(title, total=state.total_bytes, facts="")
            self._bars.update(
                self._tasks[key], completed=state.bytes_read, total=state.total_bytes, facts=_facts(state)
            )
            return
        now = self._clock()
        if now - self._shown_at >= _LINE_SECONDS or state.bytes_read >= state.total_bytes:
            self._shown_at = now
            self._console.print(f"{state.source}: {_STAGES[state.stage]}  {_facts(state)}", soft_wrap=True)

    def note(self, message: str) -> None:
        """Something to be said once."""
        self._console.print(message, soft_wrap=True, highlight=False, markup=False)


def _facts(state: PrepareState) -> str:
    done = 100 * state.bytes_read / max(1, state.total_bytes)
    tokens = f"{format_rate(float(state.tokens))} tokens  " if state.tokens else ""
    things = "pairs" if state.stage == "pairs" else "documents"
    count = "" if state.stage == "verification" else f"{format_rate(float(state.documents))} {things}  "
    return (
        f"{done:.0f} %  {count}{tokens}"
        f"{state.bytes_per_second / 1e6:.1f} MB/s  {format_duration(state.remaining_seconds)} to go"
    )


def _console(is_terminal: bool, *, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, width=None if is_terminal else _FILE_COLUMNS)


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
