"""One engine over a run of the day, for the measurements that `study throughput` does not make."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World, configure_logging, joined_world
from evenpack.launcher.processes.devices import choose_accelerator
from evenpack.studies.throughput.contenders import contender, run_to_measure
from evenpack.studies.throughput.measure import StepTimer


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What each of these programs takes."""

    config: RunConfig
    out: Path
    steps: int


def read_arguments(description: str | None, *, steps: int) -> Arguments:
    """Reads `RUN.yaml --out FILE.json [--steps N] [section.key=value ...]`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    given = parser.parse_intermixed_args()  # overrides may stand behind options
    return Arguments(config=load_run_file(given.run_file, RunConfig, given.overrides), out=given.out, steps=given.steps)


@contextmanager
def stepping(config: RunConfig, *forms: str) -> Iterator[tuple[StepTimer, list[MicroBatchDataset]]]:
    """Yields an engine, and the run's batches in these forms, on one device."""
    choose_accelerator()
    with joined_world() as world:
        configure_logging(world)
        run = run_to_measure(config)
        yield StepTimer(run, world, clock="wall"), [contender(form, run, world) for form in forms]


def device_name(world: World) -> str:
    """Returns what a result calls the device."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"CPU, {os.environ.get('OMP_NUM_THREADS', 'all')} threads"


def synchronise(world: World) -> None:
    """Waits for the device, if there is one to wait for."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
