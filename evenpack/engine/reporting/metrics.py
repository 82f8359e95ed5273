"""What a run says of itself: one JSON object a line for machines, one line of progress for people."""

import itertools
import json
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.errors import RunError
from evenpack.files import atomic_open, parse_json_object, write_json

log = logging.getLogger(__name__)

_TERMINAL_INTERVAL_SECONDS = 0.2


class MetricsLog:
    """`metrics.jsonl`: records in the order of their steps, appended by rank 0; each line reaches the file at once.

    A value that is not finite is written as null: JSON knows neither NaN nor infinity.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)  # nothing is left for `close` to write, and to fail at

    @classmethod
    def resume(cls, path: Path, *, step: int) -> "MetricsLog":
        """Opens the log of a run that goes on after `step`; 0 starts it again.

        What a log holds that does not belong to the checkpoint it is resumed from is kept under another name.
        """
        _keep_what_does_not_belong(path, step)
        cut_back(path, step=step)
        return cls(path)

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record, which must hold its `step`.

        Raises: RunError if the disk does not take it.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a record needs an integer 'step', found {record.get('step')!r}")
        line = memoryview(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        with self._writing():
            while line:
                line = line[self._file.write(line) :]

    def commit(self) -> None:
        """Flushes to disk; called before a checkpoint, so that no step of it is missing here after a power cut.

        Raises: RunError if that fails, or the file has been removed or replaced since it was opened.
        """
        with self._writing():
            os.fsync(self._file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        raise RunError(
            f"{self._path} was removed or replaced while the run was writing it: leave run.output_dir alone while a "
            "run is on, and start the same command again"
        )

    def close(self) -> None:
        """Raises: RunError if the disk did not take what was written, which a network file system may say only now."""
        with self._writing():
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with suppress(*([RunError] if error else [])):  # which has its cause in what is on its way already
            self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write to {self._path}: {error}; is the disk full?") from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records; a last line that a kill cut short is left out, and any other unreadable line is named."""
    return [record for _, record in _whole_records(path)]


def cut_back(path: Path, *, step: int) -> int:
    """Leaves only whole records of steps up to `step`, validation included; returns how many lines were removed.

    The file is replaced as a whole or, if nothing is to be removed, not touched.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        removed = sum(1 for _ in file) - sum(1 for _ in _lines_up_to(path, step))
    if removed:
        with atomic_open(path) as file:
            file.writelines(_lines_up_to(path, step))
        log.info("cut %s back to step %d: %d lines removed", path, step, removed)
    return removed


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json` atomically; values that are not finite become null."""
    write_json(path, _finite(summary))


class WindowRate:
    """Amount a second over a sliding window of time, so that it follows changes but not single hiccups."""

    def __init__(self, *, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> None:
        """Notes that `total` had been reached at time `now`, both never falling."""
        self._points.append((now, total))
        while len(self._points) > 2 and now - self._points[1][0] >= self._window_seconds:
            self._points.popleft()

    def per_second(self) -> float | None:
        """None until two points in time are known."""
        if len(self._points) < 2:
            return None
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / (last - first) if last > first else None


@runtime_checkable
class TextStream(Protocol):
    """Where progress goes: standard error, a log file, a test's buffer."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


class ProgressLine:
    """Step, loss, learning rate, tokens a second and time to go, for rank 0's terminal or log file.

    On a terminal one line is kept up to date; elsewhere a line is printed for the first and the last step and every
    `interval_seconds`. Time inside `paused` lowers no rate; the time to go grows by its share so far.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        step: int,
        stop_step: int,
        interval_seconds: float = 10.0,
        window_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._interval_seconds = _TERMINAL_INTERVAL_SECONDS if self._on_terminal else interval_seconds
        self._clock = clock
        self._stop_step = stop_step
        self._started = clock()
        self._paused_seconds = 0.0
        self._shown_at: float | None = None
        self._line_is_open = False
        self._tokens = 0
        self._step_rate = WindowRate(window_seconds=window_seconds)
        self._token_rate = WindowRate(window_seconds=window_seconds)
        self._step_rate.add(self._started, step)
        self._token_rate.add(self._started, 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens over all ranks, over the window; None before the first step."""
        return self._token_rate.per_second()

    def update(self, *, step: int, loss: float, learning_rate: float, tokens: int) -> None:
        """Notes that `step` is done; `tokens` are the real ones of this step over all ranks."""
        now = self._clock()
        self._tokens += tokens
        self._step_rate.add(now - self._paused_seconds, step)
        self._token_rate.add(now - self._paused_seconds, self._tokens)
        is_last = step >= self._stop_step
        if not is_last and self._shown_at is not None and now - self._shown_at < self._interval_seconds:
            return
        self._shown_at = now
        self._show(
            f"step {step}/{self._stop_step}  loss {loss:.4f}  lr {learning_rate:.2e}  "
            f"{format_rate(self.tokens_per_second)} tokens/s  "
            f"{format_duration(self._seconds_to_go(now, step))} to go"
        )
        if is_last:
            self.finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation and saving; what they print starts on a line of its own."""
        self.finish()
        began = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - began

    def finish(self) -> None:
        """Ends the line on a terminal; the next update begins a new one."""
        if self._line_is_open:
            self._write("\n")
            self._line_is_open = False

    def _seconds_to_go(self, now: float, step: int) -> float | None:
        steps_per_second = self._step_rate.per_second()
        if not steps_per_second:
            return None
        elapsed = now - self._started
        return (self._stop_step - step) / steps_per_second * elapsed / (elapsed - self._paused_seconds)

    def _show(self, text: str) -> None:
        if not self._on_terminal:
            self._write(f"{text}\n")
            return
        columns = shutil.get_terminal_size().columns
        # Carriage return, text, erase to the end of the line; a line that wraps could not be written over.
        self._write(f"\r{text[: columns - 1]}\x1b[K")
        self._line_is_open = True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def format_rate(per_second: float | None) -> str:
    """Three significant digits with k, M or G: '812', '45.3k', '1.20M'; '-' if unknown."""
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
    """'45s', '12m30s', '3h05m', '2d04h'; '-' if unknown."""
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


def _keep_what_does_not_belong(path: Path, step: int) -> None:
    """Keeps a copy of a log that does not tell of every step up to `step`, or of a run that has no checkpoint."""
    told = {record["step"] for _, record in _whole_records(path)} if path.exists() else set()
    missing = [number for number in range(1, step + 1) if number not in told]
    if step == 0 and told:
        kept = _free_name(path)
        path.replace(kept)
        log.warning(
            "there is no checkpoint, so the run begins at step 1, though %s tells of steps up to %d: it is kept as %s",
            path,
            max(told),
            kept.name,
        )
    elif missing:
        note = ""
        if max(told, default=0) > step:  # else nothing will be cut away
            kept = _free_name(path)
            shutil.copyfile(path, kept)
            note = f" As it was found it is kept as {kept.name}."
        log.warning(
            "%s does not tell of %d of the %d steps before the checkpoint, the first of them step %d: totals in "
            "summary.json are of the others alone.%s",
            path,
            len(missing),
            step,
            missing[0],
            note,
        )


def _free_name(path: Path) -> Path:
    numbers = itertools.count(1)
    return next(name for n in numbers if not (name := path.with_name(f"{path.stem}.kept_{n}{path.suffix}")).exists())


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    return (line for line, record in _whole_records(path) if record["step"] <= step)


def _whole_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line with its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill
            try:
                record = parse_json_object(line)
            except ValueError:
                record = {}
            if isinstance(record.get("step"), int):
                yield line, record
            else:
                log.warning("%s, line %d is no record with a step and is left out", path, number)


def _finite(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
