"""metrics.csv has a line for each step and a column for each number."""

import csv
from pathlib import Path

from run_logs import record, run_with_log

from evenpack.engine.parts.trackers import CsvMetrics
from evenpack.engine.reporting.definitions import scalars


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
    with (tmp_path / "metrics.csv").open(newline="") as file:
        found = [(row["step"], row["training/loss"]) for row in csv.DictReader(file)]
    assert found == [("1", "10.0"), ("2", "5.0"), ("3", repr(10 / 3)), ("4", "7.0")]
