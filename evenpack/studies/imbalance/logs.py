"""Sequences/s of the steady steps of a training log, in any of three formats; all other steps are cut and reported.

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
from jaxtyping import Float64

from evenpack.errors import DataError
from evenpack.files import parse_json_object

RATE_COLUMNS = ("sequences_per_second", "sequences/s", "seq/s", "seq_per_s", "samples_per_second", "samples/s")
SECONDS_COLUMNS = ("step_seconds", "seconds", "step_time")
SEQUENCES_COLUMNS = ("sequences", "samples")

_SEQ_PER_S = re.compile(r"""['"]seq/s['"]\s*:\s*([^,}\s]+)""")
_GLOBAL_STEPS = re.compile(r"""['"]global_steps['"]\s*:\s*(\d+)""")
_MLLOG = ":::MLLOG"
MINIMUM_STEPS = 50
"""Least number of steps; fewer show too little of the tail that decides at many devices."""
WARM_UP_STEPS = 10
"""Least number of warm-up steps to cut."""
DIP_SPREADS = 5.0
"""A step is a dip if its rate is this many spreads below the median. Stragglers are to be measured, so the bound is
far away: a normal law has a probability of 3e-7 there, a Gumbel none."""


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
    """Number of ranks according to metrics.jsonl; None if the log does not contain it."""
    sequences_per_step: float | None
    """Mean over these steps; None if the log does not contain it."""
    wait_share: float | None
    """Fraction of these steps for which the mean rank waits for the slowest; None if the log does not contain it."""

    @property
    def sequences_per_second(self) -> float:
        """Returns the rate of a long run: as many sequences in each step, over the mean of the steps' seconds."""
        return float(1.0 / np.mean(1.0 / self.rates))


def read_step_log(path: Path, *, column: str | None = None, warm_up_steps: int | None = None) -> StepLog:
    """Reads the steady steps of a log.

    `column` names a CSV's column of sequences/s if it has none of the usual names; `warm_up_steps` is cut
    from the front in place of what `steady_start` finds. Of a run that went on with another number of ranks, only the
    steps of the last number are kept.
    Raises: DataError, as `read_steps`, and for fewer than 50 steady steps.
    """
    found = read_steps(path, column)
    devices = next((step.ranks for step in reversed(found.steps) if step.ranks is not None), None)
    others = [step.ranks not in (None, devices) for step in found.steps]
    same = [step for step, is_other in zip(found.steps, others, strict=True) if not is_other]
    kept, cuts, warnings = _steady(same, warm_up_steps)
    cuts += _cuts(f"other ranks: the last steps are of {devices}", found.steps, others)
    if len(kept) < MINIMUM_STEPS:
        raise DataError(
            f"{path}: {len(kept)} of {len(found.steps)} steps are left without warm-up and dips, at least "
            f"{MINIMUM_STEPS} are needed; give the log of a longer run, with every step in it"
        )
    return StepLog(
        path=path,
        format=found.format,
        steps_read=len(found.steps),
        rates=np.array([step.rate for step in kept]),
        cuts=tuple(sorted(cuts, key=lambda cut: cut.first_line)),
        warnings=(*found.warnings, *warnings),
        devices=devices,
        sequences_per_step=_mean([step.sequences for step in kept]),
        wait_share=_mean([step.wait_share for step in kept]),
    )


def steady_start(rates: Float64[np.ndarray, " steps"]) -> int:
    """Returns the number of warm-up steps: until the rate first comes within a spread of its median, at least 10."""
    median, spread = _median_and_spread(rates)
    reached = np.flatnonzero(rates >= median - spread)
    return min(len(rates), max(WARM_UP_STEPS, int(reached[0])))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _median_and_spread(rates: Float64[np.ndarray, " steps"]) -> tuple[float, float]:
    """Returns median and spread.

    The spread is the median absolute deviation, scaled to a normal law's standard deviation.
    """
    median = float(np.median(rates))
    return median, 1.4826 * float(np.median(np.abs(rates - median)))


def _steady(steps: Sequence[LoggedStep], warm_up_steps: int | None) -> tuple[list[LoggedStep], list[Cut], list[str]]:
    """Returns the steps without warm-up and dips, what was cut, and warnings."""
    rates = np.array([step.rate for step in steps])
    median, spread = _median_and_spread(rates)
    start = steady_start(rates) if warm_up_steps is None else min(warm_up_steps, len(rates))
    floor = median - DIP_SPREADS * spread
    is_warm_up = np.arange(len(rates)) < start
    is_dip = (rates < floor) & ~is_warm_up
    warm_up = "warm-up: the rate had not yet come within a spread of its median" if start > WARM_UP_STEPS else "warm-up"
    dip = f"dip: below {floor:.6g} sequences/s, {DIP_SPREADS:.0f} spreads of {spread:.4g} under the median {median:.6g}"
    cuts = _cuts(warm_up, steps, is_warm_up.tolist()) + _cuts(dip, steps, is_dip.tolist())
    warnings = []
    if is_dip.sum() > 0.05 * len(rates):
        warnings.append(
            f"{is_dip.sum()} of {len(rates)} steps were cut as dips: check whether training itself is unsteady"
        )
    return [step for step, left_out in zip(steps, is_warm_up | is_dip, strict=True) if not left_out], cuts, warnings


def _cuts(reason: str, steps: Sequence[LoggedStep], is_cut: Sequence[bool]) -> list[Cut]:
    """Returns the ranges of neighbouring steps that are cut."""
    runs: list[list[int]] = []
    for index in np.flatnonzero(is_cut).tolist():
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [
        Cut(reason=reason, steps=len(run), first_line=steps[run[0]].line, last_line=steps[run[-1]].line) for run in runs
    ]
