"""Steps of a run file on the device that is here, in each layout of the same sequences.

    python benchmarks/throughput.py RUN.yaml [section.key=value ...]                        one rank
    deepspeed --num_gpus 2 benchmarks/throughput.py RUN.yaml [section.key=value ...]        several

After `evenpack prepare` with the same arguments. One engine takes the same steps in all layouts in turn, so that
whatever else the machine does hits each of them; the first rounds warm up, medians of the others count. The ratio
of packed sequences/s to padded ones, divided by the packing factor, says how much of what packing promises arrives.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evenpack.config import load_run_file
from evenpack.data.batch_form import Layout
from evenpack.data.pipeline import PipelineSettings, StepBatches, training_batches
from evenpack.data.prepared import PreparedData
from evenpack.engine.build import build_model
from evenpack.engine.deepspeed_config import micro_batches_per_step
from evenpack.engine.distributed import World, configure_logging, joined_world
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.objective import build_denominators, build_objective
from evenpack.engine.run_config import RunConfig
from evenpack.models.cost import Work, device_peak_flops, performed_work, step_flops, useful_work

LAYOUTS: tuple[Layout, ...] = ("padded", "unpadded", "packed")


def main() -> None:
    arguments = _parse_arguments()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    with joined_world() as world:
        configure_logging(world)
        report = measure(config, world, arguments.layouts, rounds=arguments.rounds, warmup=arguments.warmup)
    if world.is_main:
        print(render(report))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(config: RunConfig, world: World, layouts: list[Layout], *, rounds: int, warmup: int) -> dict[str, Any]:
    """One row a layout: medians over `rounds` steps, sums over ranks."""
    prepared = PreparedData.open(config.prepared_dir, config.data)
    micro_batches_per_step(config.training, world.size)
    engine = TrainingEngine(
        build_model(config, prepared, world.device), config, world, denominators=build_denominators(config, prepared)
    )
    streams = {
        layout: training_batches(
            prepared, _settings(config, prepared, world, layout), start_step=0, stop_step=warmup + rounds
        )
        for layout in layouts
    }
    timings: dict[Layout, list[dict[str, float]]] = {layout: [] for layout in layouts}
    memory: dict[Layout, int] = dict.fromkeys(layouts, 0)
    for number in range(warmup + rounds):
        for layout in layouts:
            step = next(streams[layout])
            seconds, peak = _time_step(engine, world, step)
            memory[layout] = max(memory[layout], peak)
            if number >= warmup:
                timings[layout].append(_rates(config, prepared, world, step, seconds))
    rows = {
        layout: {name: statistics.median(timing[name] for timing in timings[layout]) for name in timings[layout][0]}
        | {"peak_memory_bytes": memory[layout]}
        for layout in layouts
    }
    return {
        "run": config.run.name,
        "device": _device_name(world),
        "ranks": world.size,
        "precision": config.training.precision,
        "attention": config.attention.backend,
        "packs_per_step": config.training.items_per_step,
        "packs_per_micro_batch": config.training.items_per_micro_batch,
        "pack_length": config.data.pack_length,
        "rounds": rounds,
        "torch": torch.__version__,
        "packing_factor": rows[layouts[0]]["sequences_per_pack"],
        "layouts": rows,
        "ratio_of_promised_speed_up": _promised(rows),
    }


def _promised(rows: dict[Layout, dict[str, float]]) -> float | None:
    """Packed over padded sequences/s, divided by the packing factor."""
    if "packed" not in rows or "padded" not in rows:
        return None
    speed_up = rows["packed"]["sequences_per_second"] / rows["padded"]["sequences_per_second"]
    return speed_up / rows["packed"]["sequences_per_pack"]


def _time_step(engine: TrainingEngine, world: World, step: StepBatches) -> tuple[float, int]:
    """Seconds of one update from when all ranks are ready until all are done, and this device's peak memory."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        torch.cuda.synchronize(world.device)
    world.barrier()
    started = time.perf_counter()
    engine.train_step(step.step, step.micro_batches)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0


def _rates(
    config: RunConfig, prepared: PreparedData, world: World, step: StepBatches, seconds: float
) -> dict[str, float]:
    def over_ranks(value: float) -> float:
        return float(world.all_sum(torch.tensor([value], dtype=torch.float64))[0])

    def flops(works: list[Work]) -> float:
        total = sum(works[1:], works[0])
        return over_ranks(step_flops(config.model, vocabulary_size=prepared.vocabulary_size, work=total))

    useful = flops([useful_work(batch) for batch in step.micro_batches])
    performed = flops([performed_work(batch) for batch in step.micro_batches])
    slots = over_ranks(sum(batch.slots for batch in step.micro_batches))
    rates = {
        "step_seconds": seconds,
        "slots_per_second": slots / seconds,
        "tokens_per_second": step.counts.tokens / seconds,
        "sequences_per_second": step.counts.sequences / seconds,
        "sequences_per_pack": step.counts.sequences / step.counts.packs,
        "padding_share": 1.0 - step.counts.tokens / slots,
        "useful_tflops": useful / seconds / 1e12,
        "performed_tflops": performed / seconds / 1e12,
    }
    peak = _peak_flops(config, world)
    return rates if peak is None else rates | {"mfu": useful / seconds / (peak * world.size)}


def _peak_flops(config: RunConfig, world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    dtype = torch.bfloat16 if config.training.precision == "bf16_autocast" else torch.float32
    return device_peak_flops(torch.cuda.get_device_name(world.device), dtype)


def _settings(config: RunConfig, prepared: PreparedData, world: World, layout: Layout) -> PipelineSettings:
    return PipelineSettings(
        seed=config.run.seed,
        packs_per_step=config.training.items_per_step,
        packs_per_micro_batch=config.training.items_per_micro_batch,
        form=replace(config.batch_form, layout=layout),
        objective=build_objective(config, prepared),
        ranks=world.size,
        rank=world.rank,
        per_micro_batch_balance=False,
        batching=config.training.batching,
        dealing=config.training.policy,
        cost_weights=(0.0, 1.0),
        loader_workers=0,
        pin_memory=world.device.type == "cuda",
    )


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads a rank"


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    names = list(next(iter(report["layouts"].values())))
    lines = [
        f"{report['run']} on {report['ranks']} x {report['device']}, {report['precision']}, "
        f"packing factor {report['packing_factor']:.3f}, medians of {report['rounds']} steps",
        f"{'':24}" + "".join(f"{layout:>16}" for layout in report["layouts"]),
    ]
    for name in names:
        lines.append(f"{name:24}" + "".join(f"{row[name]:16,.4g}" for row in report["layouts"].values()))
    if report["ratio_of_promised_speed_up"] is not None:
        promised = report["ratio_of_promised_speed_up"]
        lines.append(f"packed over padded sequences/s, divided by the packing factor: {promised:.3f}")
    return "\n".join(lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
