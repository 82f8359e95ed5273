"""Compares attention within segments with attention over whole rows and a mask, made on the device or on the host.

    python benchmarks/dense_mask.py RUN.yaml [section.key=value ...]

Run `evenpack prepare` with the same arguments first, for a run in the layout `packed`. One model does forward and
backward passes over the same packs with each of these in turn, so that load on the machine affects all of them:

    segments      the backend that the run file names
    device_mask   `dense_mask`; the mask of a micro-batch is made on the device, once for all layers
    host_mask     `dense_mask`; it is made on the host and copied

Costs are medians over rounds of the ratio to `segments` in the same round, minus 1. Seconds are CPU seconds of the
process's threads on a CPU, otherwise wall-clock seconds; `mask_seconds` are those of making one mask, copy included.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import measuring
import torch
from torch import Tensor

from evenpack.batch import PackedBatch
from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_model
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World, configure_logging, joined_world
from evenpack.kernels import dense_mask
from evenpack.models.families import family_of

KINDS = ("segments", "device_mask", "host_mask")


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    with joined_world() as world:
        configure_logging(world)
        print(json.dumps(measure(config, world, rounds=arguments.rounds, warmup=arguments.warmup), indent=2))


def measure(config: RunConfig, world: World, *, rounds: int, warmup: int) -> dict[str, Any]:
    """Returns medians over `rounds` steps of each kind."""
    run = open_run(config)
    config = run.config
    dataset = MicroBatchDataset(run.prepared, run.pipeline_settings(world))
    engine = TrainingEngine(build_model(run, world.device), config, world, denominators=run.denominators)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    masks: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    batch = None
    for number in range(warmup + rounds):
        batches = [dataset[number * engine.micro_batches + index] for index in range(engine.micro_batches)]
        batch = batches[0]
        for kind in (*KINDS[number % 3 :], *KINDS[: number % 3]):
            passes = _time_passes(engine, number, batches, kind)
            if number >= warmup:
                seconds[kind].append(passes)
        for kind, times in masks.items():
            times.append(_time_mask(batch, config, world, kind))
    assert batch is not None
    return {
        "run": config.run.name,
        "model": config.model.shape,
        **measuring.device_facts(world.device),
        "precision": config.training.precision,
        "pack_length": config.data.pack_length,
        "packs_per_micro_batch": config.training.packs_per_micro_batch,
        "rounds": rounds,
        "seconds": {kind: statistics.median(times) for kind, times in seconds.items()},
        "cost": {
            kind: statistics.median(a / b for a, b in zip(seconds[kind], seconds["segments"], strict=True)) - 1.0
            for kind in masks
        },
        "mask_seconds": {kind: statistics.median(times) for kind, times in masks.items()},
        "mask_bytes": batch.slots * batch.row_slots * _dtype(config).itemsize,
        "boundary_bytes": batch.cu_seqlens.nbytes,
    }


def _time_passes(engine: TrainingEngine, step: int, batches: Sequence[PackedBatch], kind: str) -> float:
    backend = engine.config.attention.backend if kind == "segments" else "dense_mask"
    blocks: Any = engine.model.blocks
    for block in blocks:
        block.attention.backend = backend
    started = measuring.device_seconds(engine.world.device)
    moved = [batch.to(engine.world.device) for batch in batches]
    with _masks_of_host(batches, moved) if kind == "host_mask" else nullcontext():
        engine.compute_gradients(step, moved)
    passed = measuring.device_seconds(engine.world.device) - started
    for parameter in engine.model.parameters():
        parameter.grad = None
    return passed


def _time_mask(batch: PackedBatch, config: RunConfig, world: World, kind: str) -> float:
    moved = batch.to(world.device)
    causal = family_of(config.model).causal
    started = measuring.device_seconds(world.device)
    with _masks_of_host([batch], [moved]) if kind == "host_mask" else nullcontext():
        dense_mask.additive_mask(moved.cu_seqlens, batch.slots, batch.row_slots, causal=causal, dtype=_dtype(config))
    return measuring.device_seconds(world.device) - started


@contextmanager
def _masks_of_host(batches: Sequence[PackedBatch], moved: Sequence[PackedBatch]) -> Iterator[None]:
    """Makes the masks of these batches on the host and copies them to the device: the cost that the paper avoids.

    R x L x L numbers are copied, instead of the S + 1 boundaries.
    """
    on_host = {id(there.cu_seqlens): here.cu_seqlens for here, there in zip(batches, moved, strict=True)}
    make = dense_mask.additive_mask

    def copied(cu_seqlens: Tensor, *sizes: int, **settings: Any) -> Tensor:
        return make(on_host[id(cu_seqlens)], *sizes, **settings).to(cu_seqlens.device, non_blocking=True)

    with mock.patch.object(dense_mask, "additive_mask", copied):
        yield


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.training.precision == "bf16_autocast" else torch.float32


if __name__ == "__main__":
    main()
