"""The formats of logs of single steps.

metrics   evenpack's metrics.jsonl: `sequences` / `step_seconds` of each record, with the ranks and how long they waited
seq/s     lines of MLPerf's BERT logs: {..., 'seq/s': 381.2, 'global_steps': 75, ...}, with any prefix
csv       a column of sequences/s, or one of seconds and one of sequences
"""

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.errors import DataError
from evenpack.files import parse_json_object

RATE_COLUMNS = ("sequences_per_second", "sequences/s", "seq/s", "seq_per_s", "samples_per_second", "samples/s")
SECONDS_COLUMNS = ("step_seconds", "seconds", "step_time")
SEQUENCES_COLUMNS = ("sequences", "samples")

_SEQ_PER_S = re.compile(r"""['"]seq/s['"]\s*:\s*([^,}\s]+)""")
_GLOBAL_STEPS = re.compile(r"""['"]global_steps['"]\s*:\s*(\d+)""")
_MLLOG = ":::MLLOG"


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One step of a log."""

    line: int
    """Line of the file, from 1."""
    rate: float
    """Sequences/s over all devices."""
    sequences: float | None = None
    """Sequences of the step; None if the log does not say."""
    ranks: int | None = None
    """Number of ranks that computed it; None if the log does not say."""
    wait_share: float | None = None
    """Fraction of the step for which the mean rank waits for the slowest one; None if the log does not say."""


@dataclass(frozen=True, kw_only=True)
class LoggedSteps:
    """All steps of a file."""

    format: str
    """Recognised format of the file, in words."""
    steps: tuple[LoggedStep, ...]
    warnings: tuple[str, ...] = ()


def read_steps(path: Path, column: str | None) -> LoggedSteps:
    """Reads all steps of a file in whatever format it has.

    `column` names a CSV's column of sequences/s if it has none of the usual names.
    Raises: DataError for a file that cannot be read, has no line with a rate, or a rate that is not finite or not above
    0 (named with its line).
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the log {path}: {error.strerror}; give a file") from error
    readers: Sequence[Callable[[Path, list[str]], LoggedSteps]] = (_read_metrics, _read_seq_per_s, _read_csv)
    if column is not None:
        readers = (lambda path, lines: _read_csv(path, lines, column),)
    for reader in readers:
        found = reader(path, lines)
        if found.steps:
            return found
    raise DataError(
        f"{path}: no line with a rate. Expected records with 'sequences' and 'step_seconds' (metrics.jsonl), lines "
        "with 'seq/s': NUMBER (MLPerf logs; written with log_freq above 0, means between evaluations are not enough), "
        f"or a CSV with one of the columns {', '.join(RATE_COLUMNS)}, or {SECONDS_COLUMNS[0]} and "
        f"{SEQUENCES_COLUMNS[0]}, or one that --log-column names"
    )


def _read_metrics(path: Path, lines: list[str]) -> LoggedSteps:
    """Reads metrics.jsonl.

    Records without both fields, such as validation, are not steps; nor is an incomplete last line.
    """
    steps = []
    for number, line in enumerate(lines, start=1):
        if not line.startswith("{"):
            continue
        try:
            record = parse_json_object(line)
        except ValueError:
            continue
        if "sequences" in record and "step_seconds" in record:
            sequences = _number(record["sequences"], path, number, "sequences")
            seconds = _number(record["step_seconds"], path, number, "step_seconds")
            steps.append(
                LoggedStep(
                    line=number,
                    rate=sequences / seconds,
                    sequences=sequences,
                    ranks=_ranks(record),
                    wait_share=_wait_share(record, seconds),
                )
            )
    return LoggedSteps(format="metrics.jsonl of evenpack: sequences / step_seconds", steps=tuple(steps))


def _ranks(record: dict[str, Any]) -> int | None:
    """Returns the number of ranks of a record; None in one of a version that did not write it."""
    ranks, size = record.get("ranks"), record.get("world_size")
    seconds = ranks.get("compute_seconds") if isinstance(ranks, dict) else None
    if isinstance(seconds, list):
        return len(seconds)
    return size if isinstance(size, int) else None


def _wait_share(record: dict[str, Any], step_seconds: float) -> float | None:
    mean, slowest = record.get("compute_seconds_mean"), record.get("compute_seconds_max")
    if not (isinstance(mean, int | float) and isinstance(slowest, int | float)):
        return None
    return max(0.0, slowest - mean) / step_seconds


def _read_seq_per_s(path: Path, lines: list[str]) -> LoggedSteps:
    """Reads MLPerf logs. Some systems write each rate twice, as a dict and as an MLLOG event: then the dicts count."""
    found = [(number, line, match) for number, line in enumerate(lines, 1) if (match := _SEQ_PER_S.search(line))]
    plain = [hit for hit in found if _MLLOG not in hit[1]]
    kept = plain or found
    warnings = []
    if plain and len(plain) < len(found):
        warnings.append(f"{len(found) - len(plain)} {_MLLOG} lines with 'seq/s' repeat other lines and were left out")
    updates = [int(match[1]) for _, line, _ in kept if (match := _GLOBAL_STEPS.search(line))]
    every = statistics.median(np.diff(updates).tolist()) if len(updates) > 1 else 1
    if every > 1:
        warnings.append(f"a line is the mean of {every:.0f} steps: single steps spread more than this log shows")
    return LoggedSteps(
        format="lines with 'seq/s'",
        steps=tuple(
            LoggedStep(line=number, rate=_number(match[1], path, number, "'seq/s'")) for number, _, match in kept
        ),
        warnings=tuple(warnings),
    )


def _read_csv(path: Path, lines: list[str], column: str | None = None) -> LoggedSteps:
    header = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=header.count)
    rows = csv.reader(lines, delimiter=delimiter)
    numbered = ((rows.line_num, row) for row in rows if any(cell.strip() for cell in row))
    names = [name.strip() for name in next(numbered, (0, []))[1]]
    rate = _known(names, RATE_COLUMNS if column is None else (column,))
    seconds, sequences = _known(names, SECONDS_COLUMNS), _known(names, SEQUENCES_COLUMNS)
    if rate is not None:
        steps = _steps(numbered, lambda number, row: _cell(row, rate, path, number, names))
        return LoggedSteps(format=f"CSV: {names[rate]}", steps=steps)
    if column is not None:
        raise DataError(f"{path}: no column {column!r}, found {', '.join(names) or 'nothing'}")
    if seconds is None or sequences is None:
        return LoggedSteps(format="CSV", steps=())
    steps = _steps(
        numbered,
        lambda number, row: _cell(row, sequences, path, number, names) / _cell(row, seconds, path, number, names),
    )
    return LoggedSteps(format=f"CSV: {names[sequences]} / {names[seconds]}", steps=steps)


def _steps(rows: Iterator[tuple[int, list[str]]], rate: Callable[[int, list[str]], float]) -> tuple[LoggedStep, ...]:
    return tuple(LoggedStep(line=number, rate=rate(number, row)) for number, row in rows)


def _known(names: list[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _cell(row: list[str], index: int, path: Path, number: int, names: list[str]) -> float:
    if index >= len(row):
        raise DataError(f"{path}, line {number}: expected {len(names)} columns, got {len(row)}")
    return _number(row[index], path, number, names[index])


def _number(value: object, path: Path, number: int, name: str) -> float:
    try:
        parsed = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        parsed = math.nan
    if not (math.isfinite(parsed) and parsed > 0):
        raise DataError(f"{path}, line {number}: {name} must be a finite number above 0, got {value!r}")
    return parsed
