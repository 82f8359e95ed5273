"""What a run says of itself: one JSON object a line, and a summary."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenpack.errors import RunError
from evenpack.files import atomic_open, fsync_file, write_json

log = logging.getLogger(__name__)


class MetricsLog:
    """`metrics.jsonl`: records in the order of their steps, appended by rank 0; each line reaches the file at once.

    A value that is not finite is written as null: JSON knows neither NaN nor infinity.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8", newline="\n")

    @classmethod
    def resume(cls, path: Path, *, step: int) -> "MetricsLog":
        """Opens the log of a run that goes on after `step`; 0 starts it again."""
        cut_back(path, step=step)
        return cls(path)

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record, which must hold its `step`.

        Raises: RunError if the disk does not take it.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"a record needs an integer 'step', found {record.get('step')!r}")
        try:
            self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"cannot write to {self._path}: {error}; is the disk full?") from error

    def commit(self) -> None:
        """Flushes to disk; called before a checkpoint, so that no step of it is missing here after a power cut."""
        fsync_file(self._path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    return (line for line, record in _whole_records(path) if record["step"] <= step)


def _whole_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each whole line with its record."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # torn by a kill
            try:
                record = json.loads(line)
                whole = isinstance(record["step"], int)
            except (ValueError, KeyError, TypeError):
                whole = False
            if whole:
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
