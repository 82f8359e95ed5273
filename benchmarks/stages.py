"""Measures the opening of a run with many stages and sources, and its steps beside those of a run without stages.

    python benchmarks/stages.py [--stages 20] [--sources 50] [--json]

Opening is from the run file to the first step's plan, with the checks of `evenpack train`, in a process that has
imported evenpack; a checkpoint's stages and fingerprint are what each save adds. Seconds are the least of three.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measuring
import torch

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World
from evenpack.launcher.training import check_training
from evenpack.testing import prepared, run_config, run_values, text_sources

STEPS = 1_000_000
PLANNED = 200
"""Steps that are planned for their time."""


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=20)
    parser.add_argument("--sources", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        values = values_of(Path(directory), sources=arguments.sources, stages=arguments.stages)
        prepared(run_config(values))
        run = check_training(run_config(values), ranks=4)
        report = {
            "stages": arguments.stages,
            "sources": arguments.sources,
            "read_and_check_seconds": least(lambda: run_config(values)),
            "open_seconds": least(lambda: first_step(run_config(values), 0)),
            "open_at_99_percent_seconds": least(lambda: first_step(run_config(values), STEPS * 99 // 100)),
            "past_and_fingerprint_seconds": least(lambda: (run.past(STEPS), run.fingerprint(STEPS))),
            "plan_step_milliseconds": 1e3 * planning(run_config(values)),
            "plan_step_without_stages_milliseconds": 1e3 * planning(run_config(values | {"stages": []})),
        }
    measuring.print_report(report, as_json=arguments.json)


def values_of(folder: Path, *, sources: int, stages: int) -> dict[str, object]:
    """Returns a run whose weights, steps and rates change often, and in which sources join and retire."""
    names = [f"source_{number:02}" for number in range(sources)]
    texts = {name: [f"{name} {number * 7919}" for number in range(40)] for name in names}
    values = run_values("gpt2", folder, data={"sources": text_sources(folder, texts)}, training={"steps": STEPS})
    changes = [
        {
            "step": 1 + number * STEPS // stages,
            f"data.sources.{names[number % sources]}.weight": number % 3,
            f"data.sources.{names[-number % sources]}.weight": 10 + number,
            "training.packs_per_step": 8 * (1 + number % 4),
            "optimizer.learning_rate": 1e-3 / number,
        }
        for number in range(1, stages)
    ]
    return {**values, "stages": changes}


def first_step(config: RunConfig, step: int) -> None:
    dataset_of(config).planner.plan(step)


def dataset_of(config: RunConfig) -> MicroBatchDataset:
    run = check_training(config, ranks=4)
    world = World(rank=0, size=4, local_rank=0, device=torch.device("cpu"))
    return MicroBatchDataset(run.prepared, run.pipeline_settings(world))


def planning(config: RunConfig) -> float:
    """Returns the seconds of a step's plan, of steps of the first stage."""
    planner = dataset_of(config).planner
    return least(lambda: [planner.plan(step) for step in range(PLANNED)]) / PLANNED


def least(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
