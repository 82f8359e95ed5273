"""Progress of long work: bars on a terminal; elsewhere occasional lines, suitable for a log file."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from evenpack.units import visible

Amount = int | float
"""An amount of work, in whatever unit it is counted."""

FREQUENT_LINES_SECONDS = 5.0
"""Seconds between two lines, where there is no terminal, of work that may end within minutes, such as `prepare`."""

_TERMINAL_SECONDS = 0.2
"""Seconds between two updates on a terminal."""


class Progress:
    """Shows the progress of work, piece by piece; a context manager.

    On a terminal each piece has a bar. Elsewhere a line is printed for its first and last state and every
    `interval_seconds`, with the same facts. Time inside `paused` lowers no rate; the remaining
    time includes its fraction so far.
    """

    def __init__(
        self,
        console: Console,
        *,
        interval_seconds: float = 10.0,
        silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the interval of lines in seconds; with `silent` it shows nothing, for ranks without output."""
        self.clock = clock
        self.paused_seconds = 0.0
        self._console = console
        self._on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._interval_seconds = _TERMINAL_SECONDS if self._on_terminal else interval_seconds
        self._silent = silent
        self._bars: Bars | None = None
        self._rows: dict[Piece, TaskID] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def begin(
        self,
        name: str,
        *,
        done: Amount = 0,
        unit: str = "",
        counted: bool = False,
        elapsed_seconds: float = 0.0,
        starts_processes: bool = False,
    ) -> "Piece":
        """Begins a piece of work that began `elapsed_seconds` ago, and of which an amount of `done` is finished.

        Args:
            unit: the unit of its rate; empty: no rate is shown.
            counted: shown as `step 3/20`, not as a percentage.
            starts_processes: the work begins with its first update; what came before is in no rate, and until a
                second one no time to go is known.
        """
        piece = Piece(self, name, done=done, unit=unit, counted=counted, elapsed_seconds=elapsed_seconds)
        if not starts_processes:
            piece.start()
        return piece

    def note(self, message: str) -> None:
        """Shows a message once."""
        if not self._silent:
            self._console.print(visible(message), soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time in this context from the work; what is printed in it starts on a line of its own."""
        self.finish()
        began = self.clock()
        try:
            yield
        finally:
            self.paused_seconds += self.clock() - began

    def finish(self) -> None:
        """Leaves the bars as they are; later work has new ones below."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._rows.clear()

    def is_due(self, shown_at: float | None) -> bool:
        """Returns whether the last update is too old."""
        return shown_at is None or self.clock() - shown_at >= self._interval_seconds

    def show(self, piece: "Piece", *, share: float, facts: Sequence[str]) -> None:
        """Updates the bars, or prints a line."""
        if self._silent:
            return
        if not self._on_terminal:
            self.note("  ".join((piece.heading(share), *facts)))
            return
        if self._bars is None:
            columns = (TextColumn("{task.description}", markup=False), TextColumn("{task.fields[facts]}", markup=False))
            self._bars = Bars(columns[0], BarColumn(), columns[1], console=self._console, auto_refresh=False)
            self._bars.start()
        if piece not in self._rows:
            self._rows[piece] = self._bars.add_task("", total=1.0, facts="")
        self._bars.update(
            self._rows[piece], description=piece.heading(share), completed=share, facts="  ".join(facts), refresh=True
        )


class Piece:
    """One piece of work, from its beginning to its end."""

    def __init__(
        self, progress: Progress, name: str, *, done: Amount, unit: str, counted: bool, elapsed_seconds: float
    ) -> None:
        self._progress = progress
        self._name = visible(name)
        self._unit = unit
        self._counted = counted
        self._began = progress.clock() - elapsed_seconds
        self._paused_before = progress.paused_seconds
        self._done = done
        self._total: Amount = math.inf
        self._shown_at: float | None = None
        self._ended = False
        self._rate = WindowRate()
        self._amount_rate = WindowRate()

    def start(self) -> None:
        """Counts the time from its beginning in its rates."""
        self._rate.add(self._began - self._paused_before, self._done)
        self._amount_rate.add(self._began - self._paused_before, 0)

    def update(
        self,
        done: Amount,
        total: Amount,
        *,
        amount: Amount | None = None,
        counts: Mapping[str, int] = MappingProxyType({}),
        facts: Sequence[str] = (),
    ) -> None:
        """Notes that `done` of `total` is done.

        Args:
            amount: the amount so far and in this process on which the rate is measured; None: on `done`.
            counts: what there is so far, by its unit: `{"documents": 1200}` is shown as `1.20k documents`.
            facts: shown as they are, after the counts.
        """
        now = self._progress.clock() - self._progress.paused_seconds
        self._done, self._total = done, total
        self._rate.add(now, done)
        if amount is not None:
            self._amount_rate.add(now, amount)
        is_last = done >= total and not self._ended
        if not is_last and not self._progress.is_due(self._shown_at):
            return
        self._shown_at = self._progress.clock()
        self._ended = done >= total
        rate = self._rate if amount is None else self._amount_rate
        speed = [f"{format_rate(rate.per_second())} {self._unit}/s"] if self._unit else []
        to_go = f"{format_duration(self._seconds_to_go())} to go"
        counted = [f"{format_rate(float(count))} {unit}" for unit, count in counts.items()]
        self._progress.show(self, share=done / total if total else 1.0, facts=[*counted, *facts, *speed, to_go])

    def heading(self, share: float) -> str:
        """Returns its name, and the part that is done."""
        if self._counted:
            return f"{self._name} {self._done:.0f}/{self._total:.0f}"
        return f"{self._name}  {100 * share:.0f} %"

    def _seconds_to_go(self) -> float | None:
        if self._done >= self._total:
            return 0.0
        rate = self._rate.per_second()
        if not rate:
            return None
        elapsed = self._progress.clock() - self._began
        working = elapsed - (self._progress.paused_seconds - self._paused_before)
        return (self._total - self._done) / rate * elapsed / working


class WindowRate:
    """The rate over a sliding window of time, which follows changes but not single delays.

    Rich's own speed is unknown until a second update, and again wherever one takes longer than its window.
    """

    def __init__(self, *, window_seconds: float = 30.0) -> None:
        self._window_seconds = window_seconds
        self._points: deque[tuple[float, Amount]] = deque()

    def add(self, now: float, total: Amount) -> None:
        """Notes that `total` was reached at time `now`; both never decrease."""
        self._points.append((now, total))
        while len(self._points) > 2 and now - self._points[1][0] >= self._window_seconds:
            self._points.popleft()

    def per_second(self) -> float | None:
        """Returns the rate; None until two points in time are known."""
        if len(self._points) < 2:
            return None
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else None


def format_rate(per_second: float | None) -> str:
    """Formats with three significant digits and k, M or G: '812', '45.3k', '1.20M'; '-' if unknown."""
    if per_second is None or not math.isfinite(per_second):
        return "-"
    scaled, unit = per_second, ""
    for larger in ("k", "M", "G"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    digits = 0 if not unit or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}{unit}"


def format_duration(seconds: float | None) -> str:
    """Formats as '45s', '12m30s', '3h05m' or '2d04h'; '-' if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
