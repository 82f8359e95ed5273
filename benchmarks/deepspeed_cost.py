"""Measures what DeepSpeed adds to a step, and what torch.compile saves: the same model and batches in each.

    OMP_NUM_THREADS=1 python benchmarks/deepspeed_cost.py RUN.yaml [--rounds 20] [key=value ...]
    python benchmarks/deepspeed_cost.py RUN.yaml --trace [--ranks 8] [key=value ...]

`bare` is a plain loop of torch: forward, backward, norm and clipping, update. `engine` is a step of training, by
DeepSpeed; `compiled` the same with `training.compile`. All take each round's batches in turn; seconds are those of this
process, so OMP_NUM_THREADS=1. Ratios are of steps of the same round, with their middle half.

--trace counts instead, on a fake GPU, the operators of an engine's step that would start work there, by phase and
caller. The run must be prepared.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measuring

if TYPE_CHECKING:
    from evenpack.batch import PackedBatch
    from evenpack.engine.resolving.resolve import ResolvedRun
    from evenpack.engine.world.distributed import World

ROOT = Path(__file__).parents[1]

Step = Callable[[int, "Sequence[PackedBatch]"], float]
"""Takes a step and returns its loss."""


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--ranks", type=int, default=8, help="that are pretended by --trace")
    arguments = parser.parse_intermixed_args()
    result = traced(arguments) if arguments.trace else timed(arguments)
    measuring.write_report(result, arguments.json)


def opened(arguments: argparse.Namespace) -> "ResolvedRun":
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig
    from evenpack.engine.resolving.resolve import open_run

    return open_run(load_run_file(arguments.run_file, RunConfig, arguments.overrides))


def timed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds of each way to take a step and their ratios, and prints them."""
    from evenpack.data.batches.pipeline import SkippedStep, training_batches
    from evenpack.engine.world.distributed import joined_world

    run = opened(arguments)
    with joined_world() as world:
        ways: dict[str, Step] = {"bare": bare(run, world), "engine": engine(run, world, is_compiled=False)}
        ways["compiled"] = engine(run, world, is_compiled=True)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        losses: dict[str, float] = {}
        stop = arguments.rounds + arguments.warmup
        settings = run.pipeline_settings(world)
        for batches in training_batches(run.prepared, settings, start_step=0, stop_step=stop):
            assert not isinstance(batches, SkippedStep), "none is named"
            for name, step in ways.items():
                started = time.process_time()
                losses[name] = step(batches.step, batches.micro_batches)
                seconds[name].append(time.process_time() - started)
    measured = {name: values[arguments.warmup :] for name, values in seconds.items()}
    ratios = {
        f"{name} / {base}": [a / b for a, b in zip(measured[name], measured[base], strict=True)]
        for name, base in (("engine", "bare"), ("compiled", "engine"))
    }
    for name, values in {**measured, **ratios}.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:20} {middle:8.4f}  ({low:.4f} to {high:.4f})")
    print("first step, s  ", {name: round(values[0], 1) for name, values in seconds.items()})
    print("last loss      ", losses)
    return {"seconds": seconds, "warmup": arguments.warmup, "losses": losses}


def bare(run: "ResolvedRun", world: "World") -> Step:
    """Returns a step by torch alone, with the same loss, norm, clipping and optimizer."""
    import torch

    from evenpack.engine.build import build_model
    from evenpack.engine.optimizers.build import build_optimizer
    from evenpack.engine.optimizers.norms import total_norm
    from evenpack.models.common.loss_sums import scaled_loss

    model = build_model(run, world.device)
    optimizer = build_optimizer(model, run.config.optimizer, world.device)
    parameters, training = list(model.parameters()), run.config.training

    def step(_: int, micro_batches: "Sequence[PackedBatch]") -> float:
        model.train()
        losses = []
        for batch in micro_batches:
            with torch.autocast(world.device.type, torch.bfloat16, enabled=training.precision == "bf16_autocast"):
                sums = model(batch)
            denominators = run.denominators(batch.step_counts)
            loss: Any = scaled_loss(sums, denominators, world_size=1, accumulation=1)
            loss.backward()
            losses += [each.loss_sum.detach() for each in sums.values()]
        norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if training.gradient_clipping is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, training.gradient_clipping, norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    return step


def engine(run: "ResolvedRun", world: "World", *, is_compiled: bool) -> Step:
    """Returns a step of training, at the constant learning rate of the bare loop."""
    from evenpack.engine.build import build_model
    from evenpack.engine.engine import TrainingEngine
    from evenpack.testing import changed

    config = changed(run.config, training={"compile": is_compiled}, schedule={"kind": "constant", "warmup_steps": 0})
    made = TrainingEngine(build_model(run, world.device), config, world, denominators=run.denominators)

    def step(number: int, micro_batches: "Sequence[PackedBatch]") -> float:
        return sum(float(sums.sum()) for sums in made.train_step(number, micro_batches).loss_sums.values())

    return step


def traced(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the operators of a step by phase and caller, with the waits of the host, and prints them."""
    sys.path.append(str(ROOT / "tests"))
    from fake_gpu.device import compile_hooks, pretend_cuda

    pretend_cuda(compile_hooks(ROOT / "build/fake_cuda"))
    import torch
    from fake_gpu.counting import StepOperators
    from fake_gpu.trace import trace_steps

    from evenpack.data.batches.pipeline import SkippedStep, training_batches
    from evenpack.engine.engine import TrainingEngine
    from evenpack.engine.world.distributed import World

    run = opened(arguments)
    rank = World(rank=0, size=arguments.ranks, local_rank=0, device=torch.device("cpu"))
    (batches,) = training_batches(run.prepared, run.pipeline_settings(rank), start_step=0, stop_step=1)
    assert not isinstance(batches, SkippedStep), "none is named"
    counting: list[StepOperators] = []

    def count(engine: TrainingEngine) -> StepOperators:
        counting.append(StepOperators(engine))
        return counting[0]

    trace = trace_steps(
        run.config,
        batches.micro_batches,
        vocabulary_size=run.prepared.vocabulary_size,
        max_positions=run.config.max_positions,
        world_size=arguments.ranks,
        expected_waits=dict.fromkeys(WAITS_OF_DEEPSPEED, 0.0),
        beside=count,
    )
    table: dict[str, Counter[str]] = {}
    for kind, number in counting[0].counts.items():
        table.setdefault(f"{kind.phase or 'results'}, {kind.caller}", Counter())[kind.name] += number
    for row, names in table.items():
        few = dict(names.most_common()) if "DeepSpeed" in row or len(names) < 14 else ""
        print(f"{row:26} {names.total():6}  {few}")
    print("waits of the host", trace.expected_waits, [str(fault) for fault in trace.faults])
    return {"operators": table, "waits": dict(trace.expected_waits)}


WAITS_OF_DEEPSPEED = (
    "deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace",
    "deepspeed.runtime.utils.is_invalid_grad_norm",
)
"""Functions of ZeRO 1 that read the gradient norm."""


if __name__ == "__main__":
    main()
