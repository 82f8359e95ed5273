"""Writes output directories of runs, without training."""

import json
from pathlib import Path
from typing import Any

from run_records import DATA, run_record

from evenpack.engine.reporting.run_record import RUN_RECORD, DataIdentity, StartRecord


def record(step: int, **values: Any) -> dict[str, Any]:
    """Returns a step of 100 tokens that took 2 s; every fifth is evaluated."""
    evaluated = {"validation": {"wiki": {"loss": 6.0 - 0.1 * step}, "code": None}} if step % 5 == 0 else {}
    return {
        "step": step,
        "loss": 7.0 - 0.1 * step,
        "tokens": 100,
        "slots": 125,
        "step_seconds": 2.0,
        "tokens_per_second": 50.0 + step % 3,
        "loader_seconds": 0.5,
        "compute_seconds_mean": 0.75,
        "compute_seconds_max": 1.0,
        **evaluated,
        **values,
    }


def write_run(
    folder: Path,
    *,
    steps: int = 20,
    config: dict[str, Any] | None = None,
    data: DataIdentity | None = DATA,
    starts: tuple[StartRecord, ...] = (),
    **values: Any,
) -> Path:
    """`values`: of each record."""
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record(step, **values)) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text(lines)
    if data is not None:
        settings = {"run": {"name": folder.name, "output_dir": str(folder)}, **(config or {})}
        known = run_record(*starts, data=data, config=settings)
        (folder / RUN_RECORD).write_text(known.model_dump_json())
    return folder
