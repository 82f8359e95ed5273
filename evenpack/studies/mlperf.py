"""Logs of MLPerf runs: compliance by MLPerf's own checker, times to train, and the score of a set of runs.

The score follows the MLPerf Training rules, "Run results".
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.engine.parts.mlperf_log import parse_events
from evenpack.errors import DataError
from evenpack.files import explained

_FEWEST_INTERVALS = 3
"""Least number of intervals between evaluations, after the first; a drift needs some."""


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a log. Raises: DataError if it cannot be read."""
    with explained(path, DataError, missing=True):
        return path.read_text(encoding="utf-8-sig", errors="replace").splitlines()


@dataclass(frozen=True, kw_only=True)
class IntervalRates:
    """Rates of a run between two evaluations, without the interval before the first, which has the warm-up."""

    path: Path
    rates: tuple[float, ...]
    """Sequences/s over all devices."""
    has_evaluation: bool
    """Whether the seconds of an evaluation are in each interval, because the log does not say how long it took."""

    @property
    def sequences_per_second(self) -> float:
        """Returns the rate of the run: the harmonic mean, as intervals have equal sequences."""
        return statistics.harmonic_mean(self.rates)

    @property
    def drift(self) -> float:
        """Returns the standard deviation of the intervals' rates over their mean."""
        return statistics.stdev(self.rates) / statistics.fmean(self.rates)


def read_intervals(path: Path) -> IntervalRates | None:
    """Reads an MLPerf log of evaluations; None if the log has steps, or is none.

    Where an evaluation does not say how many sequences were trained (before round v2.0), `train_samples` is divided
    evenly among them. Raises: DataError for a file that cannot be read, or too few evaluations.
    """
    lines = read_lines(path)
    if any("'seq/s'" in line or '"seq/s"' in line for line in lines):
        return None
    events: dict[str, list[dict[str, Any]]] = {}
    for _, event in parse_events(path, lines):
        events.setdefault(event["key"], []).append(event)
    scores = events.get("eval_accuracy", [])
    if not scores:
        return None
    seconds = {
        key: [event["time_ms"] / 1e3 for event in events.get(key, [])]
        for key in ("eval_accuracy", "eval_start", "eval_stop")
    }
    sequences = [event["metadata"].get("epoch_num") for event in scores]
    total = events["train_samples"][0]["value"] if "train_samples" in events else None
    if any(np.diff([float(number or 0) for number in sequences]) <= 0):
        sequences = [(total or math.nan) * (number + 1) / len(scores) for number in range(len(scores))]
    says_evaluation = len(seconds["eval_start"]) == len(seconds["eval_stop"]) == len(scores)
    began, ended = ("eval_stop", "eval_start") if says_evaluation else ("eval_accuracy", "eval_accuracy")
    elapsed = np.array(seconds[ended][1:]) - np.array(seconds[began][:-1])
    rates = np.diff(np.array(sequences, dtype=np.float64)) / elapsed
    if len(rates) < _FEWEST_INTERVALS or not (np.isfinite(rates) & (rates > 0)).all():
        raise DataError(
            f"{path}: {len(scores)} evaluations and no lines with 'seq/s'. Rates by interval need "
            f"{_FEWEST_INTERVALS + 1} evaluations in order, with the sequences trained by then (epoch_num, or "
            "train_samples at the end): give the whole log of a finished run"
        )
    return IntervalRates(path=path, rates=tuple(rates.tolist()), has_evaluation=not says_evaluation)
