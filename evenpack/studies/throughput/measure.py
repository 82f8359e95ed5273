"""One training step, timed phase by phase: the clock, the peak of memory, and where it was measured."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_placed_model
from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.engine.provenance import commit_of_source
from evenpack.engine.resolving.cost_model import MeasuredOn
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.models.config import ModelConfig
from evenpack.models.cost import performed_work, step_flops, useful_work
from evenpack.models.families import family_of
from evenpack.studies.cost_model_fit import MicroBatchTimes
from evenpack.units import counted
from evenpack.version import VERSION

ClockName = Literal["wall", "cpu"]
"""Names of clocks; cpu is seconds of this process only, for busy machines."""


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Repeated measurements: the median and the middle half. `format` writes all three: `3 (2.5 to 4)`."""

    median: float
    quartile_1: float
    quartile_3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Summarises at least one value."""
        low, middle, high = np.percentile(values, [25, 50, 75])
        return cls(median=float(middle), quartile_1=float(low), quartile_3=float(high))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.quartile_1:{form}} to {self.quartile_3:{form}})"

    def in_percent(self) -> str:
        """Returns shares as `3 % (2.5 to 4)`."""
        median, low, high = (100.0 * value for value in (self.median, self.quartile_1, self.quartile_3))
        return f"{median:.4g} % ({low:.4g} to {high:.4g})"


class PhaseClock:
    """Observes an engine: on CUDA by events, which are recorded asynchronously; otherwise by the host's clock."""

    def __init__(self, device: torch.device, name: ClockName = "wall", *, ranks: int = 1) -> None:
        """Checks the clock. Raises: ConfigError if CPU seconds do not measure a step."""
        threads = torch.get_num_threads()
        if name == "cpu" and (device.type, threads, ranks) != ("cpu", 1, 1):
            raise ConfigError(
                "the cpu clock measures a step of one rank with one thread on a CPU (OMP_NUM_THREADS=1), found "
                f"{counted(ranks, 'rank')} with {counted(threads, 'thread')} on {device.type}: leave --clock out"
            )
        self._is_cuda = device.type == "cuda"
        self.now = time.process_time if name == "cpu" else time.perf_counter
        self._marks: list[tuple[Phase, Any]] = []

    def __call__(self, phase: Phase) -> None:
        """Ends a phase here."""
        if self._is_cuda:
            new_event: Any = torch.cuda.Event  # has no annotations
            event = new_event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, self.now()))

    def take(self) -> list[tuple[Phase, float]]:
        """Returns the seconds of each phase since `begin`, in order, and resets them.

        A CUDA device must have finished.
        """
        marks, self._marks = self._marks, []
        return [(phase, self._between(before, mark)) for (_, before), (phase, mark) in pairwise(marks)]

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1000.0 if self._is_cuda else after - before


class PeakMemory:
    """The peak of memory: allocations of torch on a CUDA device, otherwise the resident memory of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Resets the peak, if the system supports that."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # no Linux, or a sandbox: the peak is then the peak of the process so far

    def bytes(self) -> int:
        """Returns the peak since the last reset."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    """Seconds of the gradients' all-reduce, with the norm of a rank's own ones up to ZeRO 1."""
    update_seconds: float
    """Seconds of norm, clipping and update."""
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
        self.engine = TrainingEngine(build_placed_model(run, world), run.config, world, denominators=run.denominators)
        self.engine.observer = self._clock
        self._steps = 0

    def time_step_of(self, dataset: MicroBatchDataset, step: int) -> MeasuredStep:
        """Returns this rank's part of a step, timed."""
        started = self._clock.now()
        batches = micro_batches_of(dataset, step)
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
            micro_batches=_micro_batch_times(self.run.config.model, batches, [each for _, each in phases]),
            waiting_seconds=self._waiting(seconds["forward"] + seconds["backward"]),
            **self._over_ranks(batches),
        )

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
            for of in (useful_work, performed_work)
        )
        mine = (sum(batch.slots for batch in batches), useful, performed, peak)
        slots, usefuls, performeds, peaks = zip(*self.world.all_gather(mine), strict=True)
        return {
            "slots": sum(slots),
            "useful_flops": sum(usefuls),
            "performed_flops": sum(performeds),
            "peak_memory_bytes": max(peaks),
        }


def measured_on(run: ResolvedRun, world: World, *, layouts: tuple[str, ...]) -> MeasuredOn:
    """Returns the provenance that a figure must carry."""
    config = run.config
    shape = config.model.shape
    return MeasuredOn(
        device=world.device_name,
        family=config.model.kind,
        model=f"{config.model.kind} {config.model.preset}",
        causal=family_of(config.model).causal,
        layers=shape["layers"],
        hidden_size=shape["hidden_size"],
        vocabulary_size=run.prepared.vocabulary_size,
        rows_per_micro_batch=config.training.items_per_micro_batch,
        layouts=layouts,
        precision=config.training.precision,
        attention=config.attention.backend,
        evenpack=VERSION,
        torch=torch.__version__,
        commit=commit_of_source(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def micro_batches_of(dataset: MicroBatchDataset, step: int) -> list[PackedBatch]:
    """Returns this rank's micro-batches of a step, in pinned memory where the device is a GPU."""
    count = dataset.settings.micro_batches
    batches = [dataset[step * count + index] for index in range(count)]
    return [batch.pin_memory() for batch in batches] if dataset.settings.pin_memory else batches


def with_step_counts(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Turns micro-batches into one step of one rank."""
    counts = sum((batch.local_counts for batch in batches[1:]), batches[0].local_counts)
    return [replace(batch, step_counts=counts) for batch in batches]


def segment_count(batch: PackedBatch) -> int:
    """Returns the segments that attention computes, including padding; synchronises with the device."""
    return int((batch.cu_seqlens.diff() > 0).sum())


def _micro_batch_times(model: ModelConfig, batches: Sequence[PackedBatch], phases: Sequence[float]) -> MicroBatchTimes:
    """Returns forward and backward of each; `phases` begin with the forward of the first."""
    layers = model.attention_windows
    works = [performed_work(batch) for batch in batches]
    return MicroBatchTimes(
        slots=np.array([work.slots for work in works]),
        squared_lengths=np.array([work.squared_lengths for work in works]),
        pairs_within={window: np.array([work.pairs_within[window] for work in works]) for window in model.windows},
        layer_shares={window: layers.count(window) / len(layers) for window in model.windows},
        segments=np.array([segment_count(batch) for batch in batches]),
        seconds=np.array([phases[2 * index] + phases[2 * index + 1] for index in range(len(batches))]),
    )
