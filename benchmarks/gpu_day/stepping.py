"""Engines over the runs of the day, and their steps in turn: timed, profiled, and with the losses of the first ones.

    variants of a run  ->  Contender.of  ->  in_turn  ->  MeasuredStep of every variant, over the same batches

A profile has the batches of a timed step too, those that `evenpack train` would collate.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from evenpack.batch import PackedBatch
from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.parts.profile import kernels_of, summary_of
from evenpack.engine.world.distributed import World
from evenpack.studies.throughput.contenders import contender, run_to_measure
from evenpack.studies.throughput.measure import MeasuredStep, StepTimer, micro_batches_of

FEWEST_ROUNDS = 3
"""Rounds that are made even if the time is over."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to take the steps of a run."""

    name: str
    overrides: tuple[str, ...] = ()
    patched: Callable[[], AbstractContextManager[None]] = nullcontext
    """In this the steps are taken."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A variant with its engine."""

    variant: Variant
    timer: StepTimer
    dataset: MicroBatchDataset

    @classmethod
    def of(cls, run_file: Path, settings: Sequence[str], variant: Variant, world: World) -> "Contender":
        """Returns a variant over the packs of a run file, with an engine of its own."""
        run = run_to_measure(load_run_file(run_file, RunConfig, [*settings, *variant.overrides]))
        return cls(variant=variant, timer=StepTimer(run, world, clock="wall"), dataset=contender("packed", run, world))

    def losses(self, steps: int) -> list[float]:
        """Takes the run's first steps, without timing them, and returns the loss of each in nats over all ranks."""
        return [self.loss_of_step(step, micro_batches_of(self.dataset, step)) for step in range(steps)]

    def loss_of_step(self, step: int, batches: Sequence[PackedBatch]) -> float:
        """Takes a step that is not timed, and returns its loss in nats over all ranks."""
        engine, observed = self.timer.engine, self.timer.engine.observer
        engine.observer = lambda _: None  # else its phases would count for the next step
        try:
            with self.variant.patched():
                losses = engine.train_step(step, batches).optimised_losses
        finally:
            engine.observer = observed
        return float(self.timer.world.all_sum(torch.stack(list(losses.values()))).sum())

    def profiled(self, step: int, batches: Sequence[PackedBatch]) -> dict[str, Any]:
        """Returns the seconds of a step's kernels by category; on a CPU those of its operators."""
        is_cuda = self.timer.world.device.type == "cuda"
        synchronise(self.timer.world)
        # Operators of the host would be many times as many events: those of GPT-2 XL took minutes to add up.
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
            self.loss_of_step(step, batches)
            synchronise(self.timer.world)
        return summary_of(kernels_of(profiler.key_averages(), is_cuda), steps=1)


def in_turn(
    contenders: Mapping[str, Contender], *, first: int, rounds: int, until: float
) -> dict[str, list[MeasuredStep]]:
    """Takes a step of each in every round, over the same batches; the first round does not count.

    Args:
        until: by `time.monotonic`, after which no round begins.
    """
    measured: dict[str, list[MeasuredStep]] = {name: [] for name in contenders}
    dataset = next(iter(contenders.values())).dataset
    for number in range(rounds + 1):
        if number > FEWEST_ROUNDS and time.monotonic() > until:
            break
        batches = micro_batches_of(dataset, first + number)
        for name, each in contenders.items():
            with each.variant.patched():
                step = each.timer.time_step(batches)
            measured[name] += [step] if number else []
    return measured


def synchronise(world: World) -> None:
    """Waits for the device, if there is one to wait for."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
