"""One training step, timed phase by phase."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_model
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.kernels.config import WHOLE_ROWS
from evenpack.models.common.batch_work import performed_work, useful_work, work_on_whole_rows
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of
from evenpack.studies.cost_model import MicroBatchTimes
from evenpack.studies.throughput.clock import ClockName, PeakMemory, PhaseClock

Progress = Callable[[str, int, int], None]
"""Progress callback: description, steps done and steps in total."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredStep:
    """One step: amounts over all ranks, seconds of phases of this rank."""

    step_seconds: float
    """Seconds from when all ranks are ready until all have finished, without the loader."""
    waiting_seconds: float
    """Seconds of forward and backward by which the slowest rank exceeds the mean one."""
    forward_seconds: float
    backward_seconds: float
    all_reduce_seconds: float
    """Seconds of the gradients' all-reduce, their norm, and clipping."""
    update_seconds: float
    """Seconds of the optimizer."""
    loader_seconds: float
    """Planning, reading and collating in this process; `training.loader_workers` do it during the previous step."""
    packs: int
    sequences: int
    tokens: int
    slots: int
    useful_flops: int
    performed_flops: int
    peak_memory_bytes: int
    """Peak of the rank with the most."""
    micro_batches: MicroBatchTimes
    """Micro-batches of this rank."""


class StepTimer:
    """One engine that takes steps of any layout in turn."""

    def __init__(self, run: ResolvedRun, world: World, *, clock: ClockName) -> None:
        """Takes an engine.

        Raises: ConfigError if these ranks cannot divide a step, or for a clock that does not apply.
        """
        self.run = run
        self.world = world
        self._clock = PhaseClock(world.device, clock, ranks=world.size)
        self._memory = PeakMemory(world.device)
        self.engine = TrainingEngine(build_model(run, world.device), run.config, world, denominators=run.denominators)
        self.engine.observer = self._clock
        self._steps = 0

    def time_step_of(self, dataset: MicroBatchDataset, step: int) -> MeasuredStep:
        """Returns this rank's part of a step, timed."""
        count = dataset.settings.micro_batches
        started = self._clock.now()
        batches = [dataset[step * count + index] for index in range(count)]
        if dataset.settings.pin_memory:
            batches = [batch.pin_memory() for batch in batches]
        return self.time_step(batches, loader_seconds=self._clock.now() - started)

    def time_step(self, batches: Sequence[PackedBatch], *, loader_seconds: float = 0.0) -> MeasuredStep:
        """Runs an update over this rank's micro-batches, as many as the run's step has."""
        self._memory.reset()
        self._meet()
        started = self._clock.now()
        self.engine.train_step(self._steps % self.run.config.training.planned_steps, batches)
        self._meet()
        step_seconds = self._clock.now() - started
        self._steps += 1
        phases = self._clock.take()
        seconds = {phase: sum(each for name, each in phases if name == phase) for phase, _ in phases}
        counts = batches[0].step_counts
        return MeasuredStep(
            step_seconds=step_seconds,
            forward_seconds=seconds["forward"],
            backward_seconds=seconds["backward"],
            all_reduce_seconds=seconds["all_reduce"],
            update_seconds=seconds["update"],
            loader_seconds=loader_seconds,
            packs=counts.packs,
            sequences=counts.sequences,
            tokens=counts.tokens,
            micro_batches=_micro_batch_times(batches, [each for _, each in phases]),
            waiting_seconds=self._waiting(seconds["forward"] + seconds["backward"]),
            **self._over_ranks(batches),
        )

    def _performed_work(self, batch: PackedBatch) -> Work:
        config = self.run.config
        if config.attention.backend in WHOLE_ROWS:
            return work_on_whole_rows(batch, causal=family_of(config.model).causal)
        return performed_work(batch)

    def _meet(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        self.world.barrier()

    def _waiting(self, seconds: float) -> float:
        of_ranks = self.world.all_gather(seconds)
        return max(of_ranks) - sum(of_ranks) / len(of_ranks)

    def _over_ranks(self, batches: Sequence[PackedBatch]) -> dict[str, int]:
        peak = self._memory.bytes()
        useful, performed = (
            step_flops(
                self.run.config.model,
                vocabulary_size=self.run.prepared.vocabulary_size,
                work=sum((of(batch) for batch in batches[1:]), of(batches[0])),
            )
            for of in (useful_work, self._performed_work)
        )
        mine = (sum(batch.slots for batch in batches), useful, performed, peak)
        slots, usefuls, performeds, peaks = zip(*self.world.all_gather(mine), strict=True)
        return {
            "slots": sum(slots),
            "useful_flops": sum(usefuls),
            "performed_flops": sum(performeds),
            "peak_memory_bytes": max(peaks),
        }


def with_step_counts(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Turns micro-batches into one step of one rank."""
    counts = sum((batch.local_counts for batch in batches[1:]), batches[0].local_counts)
    return [replace(batch, step_counts=counts) for batch in batches]


def segment_count(batch: PackedBatch) -> int:
    """Returns the segments that attention computes, including padding; synchronises with the device."""
    return int((batch.cu_seqlens.diff() > 0).sum())


def _micro_batch_times(batches: Sequence[PackedBatch], phases: Sequence[float]) -> MicroBatchTimes:
    """Returns forward and backward of each; `phases` begin with the forward of the first."""
    works = [performed_work(batch) for batch in batches]
    return MicroBatchTimes(
        slots=np.array([work.slots for work in works]),
        squared_lengths=np.array([work.squared_lengths for work in works]),
        segments=np.array([segment_count(batch) for batch in batches]),
        seconds=np.array([phases[2 * index] + phases[2 * index + 1] for index in range(len(batches))]),
    )
