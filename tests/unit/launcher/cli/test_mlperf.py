"""`evenpack mlperf`: its output on logs, and its exit codes."""

import json
from pathlib import Path

from command_line import evenpack


def write_log(path: Path, *, minutes: float) -> Path:
    events = [
        {"key": "submission_benchmark", "value": "bert", "time_ms": 0, "metadata": {}},
        {"key": "run_start", "value": None, "time_ms": 0, "metadata": {}},
        {"key": "run_stop", "value": None, "time_ms": 60_000 * minutes, "metadata": {"status": "success"}},
    ]
    path.write_text("".join(f":::MLLOG {json.dumps(event)}\n" for event in events))
    return path


def test_ten_runs_have_a_score(tmp_path: Path) -> None:
    logs = [write_log(tmp_path / f"{index}.log", minutes=index) for index in range(1, 11)]
    done = evenpack("mlperf", "report", *logs)
    assert done.code == 0
    assert "Score: 5.500 minutes" in done.stdout
    done = evenpack("mlperf", "report", *logs[:9], "--json")
    assert done.code == 1
    document = done.json()
    assert (document["minutes"], document["reason"]) == (None, "a score needs 10 runs, found 9")
    assert len(document["runs"]) == 9


def test_a_log_that_breaks_the_rules_is_refused_with_the_checkers_message(tmp_path: Path) -> None:
    code, shown, _ = evenpack("mlperf", "check", write_log(tmp_path / "mlperf.log", minutes=5))
    assert code == 1
    assert "is refused: rules 4.1.0, unnamed division" in shown
    assert "Required EXACTLY_ONE occurrence of 'submission_division' but found 0" in shown


def test_what_is_no_log_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("hello")
    done = evenpack("mlperf", "check", tmp_path / "train.log")
    assert done.code == 2
    assert "it is not a log of MLPerf" in done.stderr
