"""Logs of MLPerf runs: compliance by MLPerf's own checker, times to train, and the score of a set of runs.

The score follows the MLPerf Training rules, "Run results".
"""

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.engine.parts.mlperf_log import PREFIX, parse_events
from evenpack.engine.resolving.requirements import require_mlperf_logging
from evenpack.errors import ConfigError, DataError, RunError
from evenpack.files import explained

RUNS_OF_A_SCORE = 10
"""Runs of a score for BERT; the fastest and the slowest are dropped, and the others averaged."""

_FEWEST_INTERVALS = 3
"""Least number of intervals between evaluations, after the first; a drift needs some."""

RULESET = "4.1.0"
"""The last ruleset but one that had BERT, which 5.0 left unchanged."""


@dataclass(frozen=True, kw_only=True)
class MlperfResult:
    """The result of one run from its log; None for missing values."""

    log: Path
    benchmark: str | None
    division: str | None
    status: str | None
    """Status `success` or `aborted`; None for a run that has not ended."""
    minutes: float | None
    """Minutes from run_start to run_stop."""
    samples: int | None
    """Samples trained on until the end."""
    accuracy: float | None
    """Accuracy of the last evaluation."""
    global_batch_size: int | None
    seed: int | None

    @property
    def is_success(self) -> bool:
        """Whether the run counts with its time; others count as the slowest."""
        return self.status == "success" and self.minutes is not None


@dataclass(frozen=True, kw_only=True)
class MlperfScore:
    """The score of a set of runs."""

    minutes: float | None
    """Mean without the fastest and the slowest; None if there is no score."""
    reason: str | None
    """The reason if there is none."""


@dataclass(frozen=True, kw_only=True)
class Compliance:
    """The checker's result for a log."""

    log: Path
    ruleset: str
    passed: bool
    messages: str
    """Messages of the checker; empty if there are none."""
    result: MlperfResult


def check_log(log: Path) -> Compliance:
    """Runs the compliance checker of the package mlperf-logging, for the division and benchmark that the log names.

    Raises: ConfigError if the package is not installed; DataError if the file is not an MLPerf log; RunError if the
    checker itself fails.
    """
    require_mlperf_logging("the compliance checker")
    result = read_result(log)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "checker.log"
        arguments = ["--usage", "training", "--ruleset", RULESET, "--log_output", str(output), str(log.resolve())]
        done = subprocess.run(
            [sys.executable, "-m", "mlperf_logging.compliance_checker", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        written = output.read_text(encoding="utf-8") if output.exists() else ""
    if done.returncode not in (0, 1) or "Traceback" in done.stderr or not written:
        raise RunError(f"MLPerf's compliance checker failed on {log}:\n{done.stderr.strip()}")
    lines = [line for line in written.splitlines() if not line.startswith("INFO")]
    messages = "\n".join(lines).removesuffix("ERROR - FAILED").strip()
    return Compliance(log=log, ruleset=RULESET, passed=done.returncode == 0, messages=messages, result=result)


def read_result(log: Path) -> MlperfResult:
    """Reads a log. Raises: DataError if the file cannot be read or holds no event."""
    events = _events(log)
    last = {event["key"]: event for event in events}
    started, stopped = last.get("run_start"), last.get("run_stop")
    minutes = None
    if started is not None and stopped is not None:
        minutes = (stopped["time_ms"] - started["time_ms"]) / 60_000
    return MlperfResult(
        log=log,
        benchmark=_value(last, "submission_benchmark"),
        division=_value(last, "submission_division"),
        status=None if stopped is None else stopped["metadata"].get("status"),
        minutes=minutes,
        samples=_value(last, "train_samples"),
        accuracy=_value(last, "eval_accuracy"),
        global_batch_size=_value(last, "global_batch_size"),
        seed=_value(last, "seed"),
    )


def score(results: Sequence[MlperfResult]) -> MlperfScore:
    """Returns the score of these runs, which needs ten runs of one benchmark, at most one of them without success.

    Raises: ConfigError if they are of different benchmarks, divisions or batch sizes, or two are of one seed.
    """
    for name in ("benchmark", "division", "global_batch_size"):
        found = {getattr(result, name) for result in results}
        if len(found) > 1:
            raise ConfigError(f"a score is of runs of one {name}, found {', '.join(sorted(map(str, found)))}")
    files = {result.log.resolve() for result in results}
    if len(files) < len(results):
        raise ConfigError(f"expected each log once, found {len(results)} names of {len(files)} files")
    seeds = [result.seed for result in results if result.seed is not None]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected runs of different seeds, found {', '.join(map(str, sorted(seeds)))}")
    if len(results) != RUNS_OF_A_SCORE:
        return MlperfScore(minutes=None, reason=f"a score needs {RUNS_OF_A_SCORE} runs, found {len(results)}")
    times = sorted(result.minutes for result in results if result.is_success and result.minutes is not None)
    failed = len(results) - len(times)
    if failed > 1:
        return MlperfScore(minutes=None, reason=f"{failed} of {len(results)} runs have not reached the target")
    kept = times[1:] if failed else times[1:-1]
    return MlperfScore(minutes=statistics.fmean(kept), reason=None)


def _events(log: Path) -> list[dict[str, Any]]:
    with explained(log, DataError, missing=True):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    events = parse_events(log, lines)
    if not events:
        raise DataError(f"{log} holds no line that begins with {PREFIX.strip()}: it is not a log of MLPerf")
    return events


def _value(last: dict[str, dict[str, Any]], key: str) -> Any:
    return last[key].get("value") if key in last else None


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
    for event in parse_events(path, lines):
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
