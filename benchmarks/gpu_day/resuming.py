"""Whether a run that goes on with half of its ranks and with all again, or has one rank, has the same steps and losses.

With `--ranks 1` it goes on with the one.

    python benchmarks/gpu_day/resuming.py RUN.yaml --ranks N --out FILE.json [section.key=value ...]

Each start is a `deepspeed` of its own, in FP32 without dropout, at ZeRO 1, whose checkpoints are converted for other
numbers of ranks. The order hash of a step is taken over the sequences that the ranks really collated, and must be that
of its plan; losses must be those of the run that was not interrupted. Fails if they are not.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measuring

from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.selection import order_hash
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.resolving.resolve import open_run
from evenpack.files import write_json
from evenpack.launcher.processes.devices import choose_accelerator
from gpu_day.ranks import deepspeed_command

STEPS_OF_A_START = 4
"""Steps between two starts of the run that is interrupted."""
STEPS = 3 * STEPS_OF_A_START
TOLERANCE = 1e-4
"""Largest relative difference of a step's loss. On a CPU 1e-5 holds (invariant 7); a GPU's kernels add gradients up in
any order, and Adam divides even the smallest ones by their size."""
_PACKS_PER_MICRO_BATCH = 2


def overrides_for(ranks: int) -> list[str]:
    """Returns the settings of a run whose step all of these ranks, half of them and one can divide."""
    half = max(1, ranks // 2)
    return [
        "model.dropout=0",
        "deepspeed.zero_stage=1",
        f"training.packs_per_step={_PACKS_PER_MICRO_BATCH * ranks * half}",
        f"training.packs_per_micro_batch={_PACKS_PER_MICRO_BATCH}",
        "training.precision=fp32",
        f"training.steps={STEPS}",
        f"training.evaluate_every_steps={STEPS}",
        f"training.checkpoint_every_steps={STEPS}",
        "schedule.warmup_steps=1",
    ]


def planned_order(config: RunConfig) -> list[str]:
    """Returns the order hash of each step as it is planned, by this process alone."""
    run = open_run(config)
    planner = MicroBatchDataset(run.prepared, run.pipeline_settings(measuring.lone_cpu())).planner
    return [f"{order_hash(planner.plan(step).packs):016x}" for step in range(STEPS)]


def trained(run_file: Path, overrides: list[str], output_dir: Path, starts: list[int]) -> dict[str, Any]:
    """Trains on these numbers of ranks, one start after the other, and returns what the run logged.

    Raises: CalledProcessError if a start fails.
    """
    shutil.rmtree(output_dir, ignore_errors=True)
    started = time.monotonic()
    for number, ranks in enumerate(starts, start=1):
        stop = f"training.stop_after_steps={STEPS * number // len(starts)}"
        worker = ["--module", "evenpack.launcher.worker", str(run_file), *overrides, stop]
        subprocess.run([*deepspeed_command(ranks), *worker, f"run.output_dir={output_dir}"], check=True)
    records = read_metrics(output_dir / "metrics.jsonl")
    return {
        "starts": starts,
        "seconds": time.monotonic() - started,
        "world_sizes": [one["world_size"] for one in records],
        "losses": [one["loss"] for one in records],
        "order": [one["order_hash"] for one in records],
    }


def compared(run: dict[str, Any], losses: list[float], order: list[str]) -> dict[str, Any]:
    """Returns the run with the largest relative difference from these losses, and whether its order is this one."""
    differences = [abs(loss / other - 1.0) for loss, other in zip(run["losses"], losses, strict=True)]
    return run | {"is_planned_order": run["order"] == order, "largest_difference": max(differences)}


def main() -> int:
    """Returns 1 if losses or order differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_intermixed_args()
    choose_accelerator()
    ranks, overrides = given.ranks, [*overrides_for(given.ranks), *given.overrides]
    config = load_run_file(given.run_file, RunConfig, overrides)
    order = planned_order(config)
    value: dict[str, Any] = {
        "ranks": ranks,
        "steps": STEPS,
        "zero_stage": config.deepspeed.zero_stage,
        "precision": config.training.precision,
        "tolerance": TOLERANCE,
        "planned_order": order,
        "runs": [],
    }
    for starts in [[1], [1, 1]] if ranks == 1 else [[ranks], [ranks, ranks // 2, ranks], [1]]:
        folder = config.run.output_dir.with_name("_".join(["resuming", *map(str, starts)]))
        run = trained(given.run_file, overrides, folder, starts)
        losses = value["runs"][0]["losses"] if value["runs"] else run["losses"]
        value["runs"].append(compared(run, losses, order))
        write_json(given.out, value)
    differs = [
        f"{one['starts']}: losses by {one['largest_difference']:.1e}, order as planned: {one['is_planned_order']}"
        for one in value["runs"]
        if one["largest_difference"] > TOLERANCE or not one["is_planned_order"]
    ]
    all_starts = ", ".join(str(one["starts"]) for one in value["runs"])
    print(f"{STEPS} steps on ranks {all_starts}; different: {'; '.join(differs) or 'none'}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
