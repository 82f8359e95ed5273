"""Writes and reads a run's metrics: metrics.jsonl, with one JSON object per line, and summary.json."""

import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from evenpack.console import plain
from evenpack.engine.ownership import require_owned
from evenpack.errors import DataError, RunError
from evenpack.files import atomic_path, explained, parse_json_object

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""File name within a run's output directory."""


class MetricsLog:
    """Appends records to `metrics.jsonl` on rank 0, in the order of their steps; each line is written at once.

    A value that is not finite is written as null, because JSON has neither NaN nor infinity.
    """

    def __init__(self, path: Path, *, gets_name: Path | None = None) -> None:
        """Opens the file at `path`, which is about to be renamed to `gets_name` if that is given."""
        self._path = gets_name or path
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # so that `close` has nothing to write, and cannot fail in that

    @classmethod
    def resume(cls, path: Path, *, step: int, begun_at: int = 0) -> "MetricsLog":
        """Opens the log of a run that resumes after `step`, with the complete records up to it.

        `begun_at`: the step after which the run has begun, that of its parent if it is a fork; a new log starts there.

        The log of a run that begins again is kept under another name. The log is always a new file, which replaces the
        old one atomically, so that a stopped process of an earlier start, when woken, appends to none that counts.

        Raises: RunError if it cannot be read or written, or if another start has taken the directory.
        """
        require_owned(path.parent)
        with explained(path, action="read or written"):
            found = [record["step"] for _, record in _whole_records(path)] if path.exists() else []
            if found and step == begun_at:
                path.replace(kept := _free_name(path))
                log.warning(
                    "the run begins after step %d, so %s of an earlier start is kept as %s", step, path, kept.name
                )
                found = []
            kept_lines = (line for line, record in _whole_records(path) if record["step"] <= step) if found else ()
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:
                with atomic_path(path, check=partial(require_owned, path.parent)) as temporary:
                    with temporary.open("wb") as file:
                        file.writelines(kept_lines)
                    resumed = opened.enter_context(cls(temporary, gets_name=path))
                opened.pop_all()
        if removed := sum(number > step for number in found):
            log.info("truncated %s to step %d: %d records removed", path, step, removed)
        logged = {number for number in found if begun_at < number <= step}
        if missing := step - begun_at - len(logged):
            log.warning("%s lacks %d steps before the checkpoint: totals in summary.json leave them out", path, missing)
        return resumed

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record, which must have the key `step`.

        Raises: RunError if it cannot be written.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a record needs an integer 'step', found {record.get('step')!r}")
        line = memoryview(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        with self._writing():
            while line:
                line = line[self._file.write(line) :]

    def commit(self) -> None:
        """Flushes the log to disk; called before a checkpoint, so that the log has all its steps after a power cut.

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
        """Closes the file. Raises: RunError if the disk was full, which a network file system may report only now."""
        with self._writing():
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with suppress(*([RunError] if error else [])):  # the error that is being raised is its cause
            self.close()

    def _writing(self) -> AbstractContextManager[None]:
        return explained(self._path, action="written")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all complete records. A torn last line is left out; a warning names any other unreadable line."""
    return [record for _, record in _whole_records(path)]


@contextmanager
def named_if_damaged(path: Path) -> Iterator[None]:
    """Names the log whose records the block reads if a value is missing or of another type. Raises: DataError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"a record in {path} is damaged ({type(error).__name__}: {error}): mend or remove its line, and run the "
            "same command again"
        ) from error


def trained_steps(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of steps that changed the weights: a skipped step has neither a loss nor times."""
    return [record for record in records if "skipped" not in record]


def find_record(path: Path, *, step: int) -> dict[str, Any] | None:
    """Returns the last complete record of a step; None if there is none. Other lines are not parsed, to save time."""
    found = None
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if b'"step": %d,' % step in line and line.endswith(b"\n"):
                    with suppress(ValueError):
                        record = parse_json_object(line)
                        found = record if record.get("step") == step else found
    return found


def save_totals(records: Sequence[dict[str, Any]], unrecorded: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the costs of all saves of a run.

    `unrecorded`: those after whose end there was no step. The last save of an earlier start is in no record, so it is
    left out.
    """
    saves = [record["checkpoint"] for record in records if record.get("checkpoint")] + [*unrecorded]
    pause_seconds = sum(save["pause_seconds"] for save in saves)
    seconds = seconds_of(records) + pause_seconds
    return {
        "saved": sum("failed" not in save for save in saves),
        "failed": sum("failed" in save for save in saves),
        "bytes": sum(save.get("bytes", 0) for save in saves),
        "pause_seconds": pause_seconds,
        "pause_share": pause_seconds / seconds if seconds else 0.0,
    }


def seconds_of(records: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds of steps and evaluations; those of saves are left out."""
    each = (record.get("step_seconds", 0.0) + (record.get("evaluation_seconds") or 0.0) for record in records)
    return sum(each, start=0.0)


def _free_name(path: Path) -> Path:
    """Returns a free name beside `path` under which a file of an earlier run is kept."""
    numbers = itertools.count(1)
    return next(name for n in numbers if not (name := path.with_name(f"{path.stem}.kept_{n}{path.suffix}")).exists())


def _whole_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each complete line with its record."""
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
                log.warning("%s, line %d is not a record with a step and is left out", path, number)
