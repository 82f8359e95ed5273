"""How `prepare` shows that it is at work."""

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from evenpack.data.prepare.progress import PrepareState
from evenpack.progress import format_duration, format_rate

_LINE_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""


_STAGES = {"tokenizer": "reading for the tokenizer", "tokens": "tokenising", "pairs": "making pairs"}


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
    return (
        f"{done:.0f} %  {format_rate(float(state.documents))} {things}  {tokens}"
        f"{state.bytes_per_second / 1e6:.1f} MB/s  {format_duration(state.remaining_seconds)} to go"
    )
