"""Writes a run's metrics.jsonl, with which trackers begin."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loop_steps import start_of
from run_files import run_config, run_values

from evenpack.engine.build import Start
from evenpack.engine.config import MetricsSection
from evenpack.engine.reporting.metrics import METRICS, MetricsLog


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 / step, "tokens": 100 + step, **values}


def run_with_log(folder: Path, *, steps: Iterable[int] = (), metrics: MetricsSection | None = None) -> Start:
    """Returns a run that begins, or resumes after the last of `steps`."""
    told = list(steps)
    (folder / METRICS).unlink(missing_ok=True)
    with MetricsLog(folder / METRICS) as log:
        for step in told:
            log.append(record(step))
    config = run_config(run_values("gpt2", folder, run={"name": "tried", "output_dir": str(folder)}))
    resolved = SimpleNamespace(config=config.model_copy(update={"metrics": metrics or MetricsSection()}))
    return start_of(resolved=resolved, checkpoint=SimpleNamespace(step=told[-1]) if told else None)
