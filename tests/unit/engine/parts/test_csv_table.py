"""metrics.csv has a line for each step and a column for each number."""

import csv
from pathlib import Path

from run_logs import record, run_with_log

from evenpack.engine.parts.trackers import CsvMetrics
from evenpack.engine.reporting.definitions import scalars


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_column_that_comes_later_is_empty_before(tmp_path: Path) -> None:
    table = CsvMetrics(run_with_log(tmp_path))
    table.write(1, scalars(record(1)))
    table.write(2, scalars(record(2, validation={"a, b": {"loss": 2.5}})))
    table.write(3, scalars(record(3)))
    table.close(failed=False)
    assert rows(tmp_path) == [
        {"step": "1", "training/loss": "10.0", "data/tokens": "101", "validation/a, b/loss": ""},
        {"step": "2", "training/loss": "5.0", "data/tokens": "102", "validation/a, b/loss": "2.5"},
        {"step": "3", "training/loss": repr(10 / 3), "data/tokens": "103", "validation/a, b/loss": ""},
    ]


def test_a_run_that_resumes_has_each_step_once(tmp_path: Path) -> None:
    first = CsvMetrics(run_with_log(tmp_path))
    for step in range(1, 6):
        first.write(step, scalars(record(step)))
    first.close(failed=True)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("6,1.2")  # killed in the middle of a line
    table = CsvMetrics(run_with_log(tmp_path, steps=range(1, 4)))
    table.write(4, {"training/loss": 7.0})
    table.close(failed=False)
    assert [(row["step"], row["training/loss"]) for row in rows(tmp_path)] == [
        ("1", "10.0"),
        ("2", "5.0"),
        ("3", repr(10 / 3)),
        ("4", "7.0"),
    ]
