"""Logs of MLPerf runs, and the score of ten of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evenpack.errors import ConfigError, DataError
from evenpack.studies.mlperf import MlperfResult, read_result, score

START_MS = 1_700_000_000_000


def write_log(
    path: Path,
    *,
    minutes: float,
    status: str = "success",
    batch: int = 768,
    division: str = "open",
    seed: int | None = None,
) -> Path:
    events: list[dict[str, Any]] = [
        {"key": "submission_benchmark", "value": "bert"},
        {"key": "submission_division", "value": division},
        {"key": "global_batch_size", "value": batch},
        {"key": "seed", "value": seed},
        {"key": "run_start", "value": None, "time_ms": START_MS},
        {"key": "eval_accuracy", "value": 0.5},
        {"key": "eval_accuracy", "value": 0.721},
        {"key": "train_samples", "value": 2_500_000},
        {"key": "run_stop", "value": None, "time_ms": START_MS + 60_000 * minutes, "metadata": {"status": status}},
    ]
    lines = [
        f"torch says hello :::MLLOG {json.dumps({'time_ms': START_MS, 'metadata': {}, **event})}" for event in events
    ]
    path.write_text("\n".join(["a line of another program", *lines]), encoding="utf-8")
    return path


def runs(folder: Path, minutes: Sequence[float], *, failed: int = 0) -> list[MlperfResult]:
    return [
        read_result(write_log(folder / f"{index}.log", minutes=each, status="aborted" if index < failed else "success"))
        for index, each in enumerate(minutes)
    ]


def test_a_log_is_read_among_other_lines(tmp_path: Path) -> None:
    result = read_result(write_log(tmp_path / "mlperf.log", minutes=5.5))
    assert (result.benchmark, result.division, result.status) == ("bert", "open", "success")
    assert (result.minutes, result.samples, result.accuracy) == (5.5, 2_500_000, 0.721)


def test_the_fastest_and_the_slowest_of_ten_are_dropped(tmp_path: Path) -> None:
    minutes = [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 100.0, 1.0]
    assert score(runs(tmp_path, minutes)).minutes == 8.5


def test_one_run_that_missed_the_target_is_the_slowest_whatever_its_time(tmp_path: Path) -> None:
    minutes = [0.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 1.0]
    assert score(runs(tmp_path, minutes, failed=1)).minutes == 8.5, "of 5 to 12: 1.0 is the fastest"


def test_two_runs_that_missed_the_target_leave_no_score(tmp_path: Path) -> None:
    found = score(runs(tmp_path, [float(index) for index in range(1, 11)], failed=2))
    assert (found.minutes, found.reason) == (None, "2 of 10 runs have not reached the target")


def test_nine_runs_have_no_score(tmp_path: Path) -> None:
    assert score(runs(tmp_path, [5.0] * 9)).reason == "a score needs 10 runs, found 9"


def test_runs_of_two_batch_sizes_and_a_log_given_twice_are_refused(tmp_path: Path) -> None:
    one = read_result(write_log(tmp_path / "one.log", minutes=5))
    other = read_result(write_log(tmp_path / "other.log", minutes=5, batch=448))
    with pytest.raises(ConfigError, match="runs of one global_batch_size, found 448, 768"):
        score([one, other])
    with pytest.raises(ConfigError, match="expected each log once, found 2 names of 1 files"):
        score([one, one])


def test_runs_of_one_seed_are_no_two_runs(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"{index}.log", minutes=5, seed=7) for index in range(2)]
    with pytest.raises(ConfigError, match="expected runs of different seeds, found 7, 7"):
        score([read_result(log) for log in logs])


def test_runs_of_two_divisions_have_no_common_score(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"{name}.log", minutes=5, division=name) for name in ("open", "closed")]
    with pytest.raises(ConfigError, match="runs of one division, found closed, open"):
        score([read_result(log) for log in logs])


def test_a_run_that_has_not_ended_has_no_time(tmp_path: Path) -> None:
    log = write_log(tmp_path / "mlperf.log", minutes=5)
    log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    assert (read_result(log).status, read_result(log).minutes) == (None, None)
    assert not read_result(log).is_success


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing of the kind", "holds no line that begins with :::MLLOG"),
        (
            ':::MLLOG {"key": "run_start"}',
            "line 1: expected a JSON object with key, value, time_ms, metadata after :::MLLOG",
        ),
        (":::MLLOG {torn", "line 1: expected a JSON object"),
    ],
)
def test_what_is_no_log_is_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(text)
    with pytest.raises(DataError, match=expected) as caught:
        read_result(log)
    assert str(log) in str(caught.value)


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mlperf\.log cannot be read: No such file"):
        read_result(tmp_path / "mlperf.log")
