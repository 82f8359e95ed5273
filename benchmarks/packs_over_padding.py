"""Measures how much faster packs are than padding of the same sequences, on one device and for any run file.

    python benchmarks/packs_over_padding.py RUN.yaml [section.key=value ...]

Run `evenpack prepare` with the same arguments first, for a run in the layout `packed`. One model does forward and
backward passes over the same steps, packed and with each sequence in a row of its own, in turn, so that load on the
machine affects both; updates, which cost the same, are left out. The speed-up is the median over rounds of the ratio in
the same round. Seconds are CPU seconds of the process's threads on a CPU, otherwise wall-clock seconds. `factor` is the
padded slots over the packed ones in the steps that were measured. `operations_factor` is the ratio of their operations
as `evenpack/models/cost.py` counts them: it is lower where a head works at masked tokens alone, which packing does not
make fewer.
"""

import json
import statistics
from typing import Any

import measuring

from evenpack.config import load_run_file, with_values
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_model
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World, configure_logging, joined_world
from evenpack.models.cost import performed_work, step_flops

LAYOUTS = ("packed", "padded")


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    with joined_world() as world:
        configure_logging(world)
        print(json.dumps(measure(config, world, rounds=arguments.rounds, warmup=arguments.warmup), indent=2))


def measure(config: RunConfig, world: World, *, rounds: int, warmup: int) -> dict[str, Any]:
    """Returns the speed-up over `rounds` steps, and the factor of their slots."""
    layouts = {name: {"training": {"layout": name}} for name in LAYOUTS}
    runs = {name: open_run(with_values(config, change, origin=name)) for name, change in layouts.items()}
    datasets = {name: MicroBatchDataset(run.prepared, run.pipeline_settings(world)) for name, run in runs.items()}
    run = runs["packed"]
    engine = TrainingEngine(build_model(run, world.device), run.config, world, denominators=run.denominators)
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    slots, tokens, operations = dict.fromkeys(LAYOUTS, 0), dict.fromkeys(LAYOUTS, 0), dict.fromkeys(LAYOUTS, 0)
    for number in range(warmup + rounds):
        for name in LAYOUTS if number % 2 else LAYOUTS[::-1]:
            first = number * engine.micro_batches
            batches = [datasets[name][first + index] for index in range(engine.micro_batches)]
            moved = [batch.to(world.device) for batch in batches]
            started = measuring.device_seconds(world.device)
            engine.compute_gradients(number, moved)
            passed = measuring.device_seconds(world.device) - started
            for parameter in engine.model.parameters():
                parameter.grad = None
            if number >= warmup:
                seconds[name].append(passed)
                slots[name] += sum(batch.slots for batch in batches)
                tokens[name] += sum(batch.local_counts.tokens for batch in batches)
                operations[name] += sum(
                    step_flops(config.model, vocabulary_size=run.prepared.vocabulary_size, work=performed_work(batch))
                    for batch in batches
                )
    assert tokens["packed"] == tokens["padded"], "both layouts hold the same sequences in each step"
    ratios = [padded / packed for packed, padded in zip(*(seconds[name] for name in LAYOUTS), strict=True)]
    speed_up, factor = statistics.median(ratios), slots["padded"] / slots["packed"]
    operations_factor = operations["padded"] / operations["packed"]
    return {
        "run": run.config.run.name,
        "model": run.config.model.shape,
        **measuring.device_facts(world.device),
        "precision": run.config.training.precision,
        "pack_length": run.config.data.pack_length,
        "rounds": rounds,
        "tokens_per_step": tokens["packed"] / rounds,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "speed_up": speed_up,
        "speed_up_lowest": min(ratios),
        "speed_up_highest": max(ratios),
        "factor": factor,
        "share_of_factor": speed_up / factor,
        "operations_factor": operations_factor,
        "share_of_operations_factor": speed_up / operations_factor,
    }


if __name__ == "__main__":
    main()
