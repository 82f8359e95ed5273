"""Sequences/s of each step from a training log; steps outside of steady training are cut and reported.

metrics   evenpack's metrics.jsonl: `sequences` / `step_seconds` of each record
seq/s     lines of MLPerf's BERT logs: {..., 'seq/s': 381.2, 'global_steps': 75, ...}, with any prefix
csv       a column of sequences/s, or one of seconds and one of sequences
"""

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.errors import DataError
from evenpack.files import parse_json_object

MINIMUM_STEPS = 50
"""Least number of steps; fewer show too little of the tail that decides at many devices."""
WARM_UP_STEPS = 10
"""Least number of warm-up steps to cut."""
DIP_SPREADS = 5.0
"""A step is a dip if its rate is this many spreads below the median. Stragglers are to be measured, so the bound is
far away: a normal law has a probability of 3e-7 there, a Gumbel none."""

RATE_COLUMNS = ("sequences_per_second", "sequences/s", "seq/s", "seq_per_s", "samples_per_second", "samples/s")
SECONDS_COLUMNS = ("step_seconds", "seconds", "step_time")
SEQUENCES_COLUMNS = ("sequences", "samples")

_SEQ_PER_S = re.compile(r"""['"]seq/s['"]\s*:\s*([^,}\s]+)""")
_GLOBAL_STEPS = re.compile(r"""['"]global_steps['"]\s*:\s*(\d+)""")
_MLLOG = ":::MLLOG"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A range of steps that is left out."""

    reason: str
    steps: int
    first_line: int
    """First line of the range in the file, from 1."""
    last_line: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLog:
    """The steady steps of a log."""

    path: Path
    format: str
    """Recognised format of the file, in words."""
    steps_read: int
    rates: Float64[np.ndarray, " steps"]
    """Sequences/s over all devices, in the order of the file."""
    cuts: tuple[Cut, ...]
    """Cuts in the order of the file; together with `rates` they cover all steps."""
    warnings: tuple[str, ...]
    devices: int | None
    """Number of ranks according to metrics.jsonl with records of single ranks; None if the log does not contain it."""


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """All steps of a file with their lines."""

    format: str
    lines: list[int]
    rates: list[float]
    warnings: tuple[str, ...] = ()
    devices: int | None = None


def read_step_log(path: Path, *, column: str | None = None, warm_up_steps: int | None = None) -> StepLog:
    """Reads the steady steps of a log.

    `column` names a CSV's column of sequences/s if it has none of the usual names; `warm_up_steps` is cut
    from the front in place of what `steady_start` finds.
    Raises: DataError for a file that cannot be read, has no line with a rate, a rate that is not finite or not above
    0 (named with its line), or fewer than 50 steady steps.
    """
    steps = _read(path, column)
    rates = np.array(steps.rates)
    median, spread = _median_and_spread(rates)
    start = steady_start(rates) if warm_up_steps is None else min(warm_up_steps, len(rates))
    floor = median - DIP_SPREADS * spread
    is_dip = rates < floor
    is_dip[:start] = False
    reason = (
        f"dip: below {floor:.6g} sequences/s, {DIP_SPREADS:.0f} spreads of {spread:.4g} under the median {median:.6g}"
    )
    warm_up = "warm-up: the rate had not yet come within a spread of its median" if start > WARM_UP_STEPS else "warm-up"
    cuts = ([_cut(warm_up, steps.lines[:start])] if start else []) + [
        _cut(reason, [steps.lines[step] for step in run]) for run in _runs(np.flatnonzero(is_dip).tolist())
    ]
    steady = rates[start:][~is_dip[start:]]
    if len(steady) < MINIMUM_STEPS:
        raise DataError(
            f"{path}: {len(steady)} of {len(rates)} steps are left without warm-up and dips, at least {MINIMUM_STEPS} "
            "are needed; give the log of a longer run, with every step in it"
        )
    warnings = steps.warnings
    if is_dip.sum() > 0.05 * len(rates):
        warnings += (
            f"{is_dip.sum()} of {len(rates)} steps were cut as dips: check whether training itself is unsteady",
        )
    return StepLog(
        path=path,
        format=steps.format,
        steps_read=len(rates),
        rates=steady,
        cuts=tuple(cuts),
        warnings=warnings,
        devices=steps.devices,
    )


def steady_start(rates: Float64[np.ndarray, " steps"]) -> int:
    """Returns the number of warm-up steps: until the rate first comes within a spread of its median, at least 10."""
    median, spread = _median_and_spread(rates)
    reached = np.flatnonzero(rates >= median - spread)
    return min(len(rates), max(WARM_UP_STEPS, int(reached[0])))


def _median_and_spread(rates: Float64[np.ndarray, " steps"]) -> tuple[float, float]:
    """Returns median and spread.

    The spread is the median absolute deviation, scaled to a normal law's standard deviation.
    """
    median = float(np.median(rates))
    return median, 1.4826 * float(np.median(np.abs(rates - median)))


def _read(path: Path, column: str | None) -> _Steps:
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the log {path}: {error.strerror}; give a file") from error
    readers: Sequence[Callable[[Path, list[str]], _Steps]] = (_read_metrics, _read_seq_per_s, _read_csv)
    if column is not None:
        readers = (lambda path, lines: _read_csv(path, lines, column),)
    for reader in readers:
        steps = reader(path, lines)
        if steps.rates:
            return steps
    raise DataError(
        f"{path}: no line with a rate. Expected records with 'sequences' and 'step_seconds' (metrics.jsonl), lines "
        "with 'seq/s': NUMBER (MLPerf logs; written with log_freq above 0, means between evaluations are not enough), "
        f"or a CSV with one of the columns {', '.join(RATE_COLUMNS)}, or {SECONDS_COLUMNS[0]} and "
        f"{SEQUENCES_COLUMNS[0]}, or one that --log-column names"
    )


def _read_metrics(path: Path, lines: list[str]) -> _Steps:
    """Reads metrics.jsonl.

    Records without both fields, such as validation, are not steps; nor is an incomplete last line.
    """
    steps = _Steps(format="metrics.jsonl of evenpack: sequences / step_seconds", lines=[], rates=[])
    devices = None
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
            steps.lines.append(number)
            steps.rates.append(sequences / seconds)
            devices = _ranks(record) or devices
    return replace(steps, devices=devices)


def _ranks(record: dict[str, Any]) -> int | None:
    """Returns the number of ranks from a record with the times of each; None without such a record."""
    ranks = record.get("ranks")
    seconds = ranks.get("compute_seconds") if isinstance(ranks, dict) else None
    return len(seconds) if isinstance(seconds, list) else None


def _read_seq_per_s(path: Path, lines: list[str]) -> _Steps:
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
    return _Steps(
        format="lines with 'seq/s'",
        lines=[number for number, _, _ in kept],
        rates=[_number(match[1], path, number, "'seq/s'") for number, _, match in kept],
        warnings=tuple(warnings),
    )


def _read_csv(path: Path, lines: list[str], column: str | None = None) -> _Steps:
    header = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t", key=header.count)
    rows = csv.reader(lines, delimiter=delimiter)
    numbered = ((rows.line_num, row) for row in rows if any(cell.strip() for cell in row))
    names = [name.strip() for name in next(numbered, (0, []))[1]]
    rate = _known(names, RATE_COLUMNS if column is None else (column,))
    seconds, sequences = _known(names, SECONDS_COLUMNS), _known(names, SEQUENCES_COLUMNS)
    if rate is not None:
        steps = _Steps(format=f"CSV: {names[rate]}", lines=[], rates=[])
        _fill(steps, path, numbered, lambda number, row: _cell(row, rate, path, number, names))
        return steps
    if column is not None:
        raise DataError(f"{path}: no column {column!r}, found {', '.join(names) or 'nothing'}")
    if seconds is None or sequences is None:
        return _Steps(format="CSV", lines=[], rates=[])
    steps = _Steps(format=f"CSV: {names[sequences]} / {names[seconds]}", lines=[], rates=[])
    _fill(
        steps,
        path,
        numbered,
        lambda number, row: _cell(row, sequences, path, number, names) / _cell(row, seconds, path, number, names),
    )
    return steps


def _fill(
    steps: _Steps, path: Path, rows: Iterator[tuple[int, list[str]]], rate: Callable[[int, list[str]], float]
) -> None:
    for number, row in rows:
        steps.lines.append(number)
        steps.rates.append(rate(number, row))


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


def _cut(reason: str, lines: list[int]) -> Cut:
    return Cut(reason=reason, steps=len(lines), first_line=lines[0], last_line=lines[-1])


def _runs(indices: list[int]) -> list[list[int]]:
    """Yields ranges of consecutive numbers."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
