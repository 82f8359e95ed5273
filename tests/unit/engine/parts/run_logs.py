"""Writes a run's metrics.jsonl, with which trackers begin."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenpack.engine.parts.trackers import RunLog
from evenpack.engine.reporting.metrics import METRICS, MetricsLog


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 / step, "tokens": 100 + step, **values}


def run_log(folder: Path, *, steps: Iterable[int] = ()) -> RunLog:
    """Returns a run that begins, or resumes after the last of `steps`."""
    told = list(steps)
    (folder / METRICS).unlink(missing_ok=True)
    with MetricsLog(folder / METRICS) as log:
        for step in told:
            log.append(record(step))
    return RunLog(
        name="tried",
        output_dir=folder,
        config={"run": {"seed": 3}},
        first_step=max(told, default=0),
    )
