"""What a run says of itself: one JSON object a line, and a summary."""

import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evenpack.errors import RunError
from evenpack.files import atomic_open, parse_json_object, write_json

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
"""Of a run's output directory."""


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


def find_record(path: Path, *, step: int) -> dict[str, Any] | None:
    """The last whole record of a step; None without one. Other lines are not parsed, so that long logs take no time."""
    found = None
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if b'"step": %d,' % step in line and line.endswith(b"\n"):
                    with suppress(ValueError):
                        record = parse_json_object(line)
                        found = record if record.get("step") == step else found
    return found


def samples_trained(path: Path, *, step: int) -> int:
    """Sequences of all steps up to `step` that the log tells of."""
    records = read_metrics(path) if path.exists() else []
    return sum(record.get("sequences", 0) for record in records if record["step"] <= step)


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


def _keep_what_does_not_belong(path: Path, step: int) -> None:
    """Keeps a copy of a log that does not tell of every step up to `step`, or of a run that has no checkpoint."""
    told = {record["step"] for _, record in _whole_records(path)} if path.exists() else set()
    missing = [number for number in range(1, step + 1) if number not in told]
    if step == 0 and told:
        kept = free_name(path)
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
            kept = free_name(path)
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


def free_name(path: Path) -> Path:
    """Where a file of an earlier run is kept, beside the one that takes its place."""
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
