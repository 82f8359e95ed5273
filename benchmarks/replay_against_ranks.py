"""Clusters replayed on one device against ranks that train together, step by step.

    python benchmarks/replay_against_ranks.py RUN.yaml [section.key=value ...] [--ranks 2,4] [--steps N] [--batch N]

For each number of ranks `deepspeed` starts real ones on this machine, which plan, read and compute the steps that a run
on so many ranks has. On GPUs (NCCL) the seconds of each rank's forward and backward passes are those of its device.
Without GPUs ranks are on the CPU (gloo, one thread each), and their CPU seconds count, so that they may be more than
there are cores. `evenpack study imbalance --replay` then computes the same steps alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from gpu_day.ranks import deepspeed_command

from evenpack import console
from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.world.distributed import World, joined_world
from evenpack.files import read_json, write_json
from evenpack.launcher.processes.devices import choose_accelerator, cuda_devices
from evenpack.progress import Progress
from evenpack.studies.imbalance.cluster import ClusterOptions, Scheme
from evenpack.studies.imbalance.replay import REPLAYED, Replay, replay
from evenpack.studies.throughput.contenders import run_to_measure, with_steps
from evenpack.studies.throughput.measure import PhaseClock, StepTimer

_WARMUP = 2


def rank_seconds(config: RunConfig, world: World, scheme: Scheme, *, each: int, steps: int) -> list[list[float]]:
    """Returns the seconds of each rank in each step that they train together: a GPU's by events, or CPU seconds."""
    run = run_to_measure(config)
    per_step = world.size * each
    settled = with_steps(run.config, scheme.batching, scheme.layout, scheme.policy, each=each, per_step=per_step)
    resolved = resolve(settled, run.prepared)
    timer = StepTimer(resolved, world, clock="wall")
    if world.device.type == "cpu":
        timer._clock = timer.engine.observer = PhaseClock(world.device, "cpu")  # of this rank alone, which waits unseen
    dataset = MicroBatchDataset(run.prepared, resolved.pipeline_settings(world))
    for step in range(_WARMUP):
        timer.time_step_of(dataset, steps + step)
    seconds = [float(timer.time_step_of(dataset, step).micro_batches.seconds.sum()) for step in range(steps)]
    return [list(of_step) for of_step in zip(*world.all_gather(seconds), strict=True)]


def compared(seconds: list[list[float]], scheme: Scheme, ranks: int, replayed: Replay) -> dict[str, Any]:
    """Returns how long the slowest rank takes over the mean one, trained and replayed, both with the same update."""
    trained = np.array(seconds) + replayed.update_seconds
    row = next(row for row in replayed.of(scheme) if row.devices == ranks)
    waits = trained.max(axis=1) / trained.mean(axis=1)
    return {
        "scheme": scheme.label,
        "ranks": ranks,
        "steps": len(trained),
        "trained_slowest_over_mean": float(waits.mean()),
        "standard_error": float(waits.std(ddof=1) / len(waits) ** 0.5),
        "replayed_slowest_over_mean": row.slowest_over_mean,
        "difference": row.slowest_over_mean / float(waits.mean()) - 1.0,
        "trained_wait_share": 1.0 - float(trained.mean() / trained.max(axis=1).mean()),
        "replayed_wait_share": row.wait_share,
    }


def main() -> None:
    """Starts the ranks, replays their steps, and prints both as a table and as JSON."""
    parser = measuring.parser_of(__doc__, run_file=True)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--of-a-rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    choose_accelerator()
    config = load_run_file(given.run_file, RunConfig, given.overrides)
    if given.of_a_rank is not None:
        with joined_world() as world:
            found = {}
            for scheme in REPLAYED:
                each = given.packs if scheme.batching == "packs" else given.batch
                found[scheme.label] = rank_seconds(config, world, scheme, each=each, steps=given.steps)
            if world.is_main:
                write_json(given.of_a_rank, found)
        return
    counts = [int(word) for word in given.ranks.split(",")]
    trained = {ranks: _trained(ranks) for ranks in counts}
    with joined_world() as world, Progress(console.messages()) as progress:
        replayed = replay(
            config,
            world,
            devices=counts,
            steps=given.steps,
            options=ClusterOptions(batch=given.batch),
            packs=given.packs,
            progress=progress,
        )
    rows = [compared(trained[ranks][scheme.label], scheme, ranks, replayed) for scheme in REPLAYED for ranks in counts]
    console.results().print(console.table(rows, title="Slowest rank / mean rank: trained together, and replayed"))
    if given.save is not None:
        about = {"measured_on": replayed.measured_on, "batch": given.batch, "packs": given.packs}
        console.save_json(about | {"rows": rows}, given.save)


def _trained(ranks: int) -> dict[str, list[list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [*deepspeed_command(ranks), *sys.argv, "--of-a-rank", str(path)]
        on_cpu = {} if cuda_devices() else {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, env=os.environ | on_cpu, check=True)
        found: dict[str, list[list[float]]] = read_json(path)
        return found


if __name__ == "__main__":
    main()
