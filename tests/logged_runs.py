"""Runs that have trained, by their files alone: run.json and metrics.jsonl with steps of known times."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from run_records import run_record, start

from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.run_record import DataIdentity
from evenpack.engine.resolving.resolve import open_run

CPU = "CPU (test), 1 thread a rank"


def log_run(
    config: RunConfig,
    *,
    ranks: int = 2,
    device: str = CPU,
    commit: str = "abc123",
    seconds: float = 0.5,
    sequences: int = 16,
    steps: int = 80,
) -> Path:
    """Writes what a run of `config` leaves, and returns its output directory.

    A step takes `seconds`, up to 5 % more or less, of which the mean rank waits a tenth.
    """
    run = open_run(config)
    output_dir = config.run.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    data = DataIdentity(
        fingerprint=run.prepared.fingerprint(seed=0),
        tokenizer=run.prepared.manifest.tokenizer.checksum,
        vocabulary_size=run.prepared.vocabulary_size,
        pack_length=run.prepared.pack_length,
        sources=tuple(run.prepared.source_names),
    )
    started = start(ranks=ranks, device=device, commit=commit)
    record = run_record(started, data=data, config=run.config.model_dump(mode="json"))
    (output_dir / "run.json").write_text(json.dumps(record.model_dump(mode="json")))
    times = seconds * np.random.default_rng(0).uniform(0.95, 1.05, steps)
    lines = [_record(step, one, sequences, ranks) for step, one in enumerate(times.tolist(), start=1)]
    (output_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return output_dir


def _record(step: int, seconds: float, sequences: int, ranks: int) -> dict[str, Any]:
    return {
        "step": step,
        "sequences": sequences,
        "step_seconds": seconds,
        "world_size": ranks,
        "compute_seconds_mean": 0.8 * seconds,
        "compute_seconds_max": 0.9 * seconds,
        "ranks": {"steps": 1, "compute_seconds": [0.8 * seconds] * ranks},
    }
