"""Seconds of the phases of a step, its peak of memory, and how values scatter."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evenpack.engine.engine import Phase
from evenpack.errors import ConfigError

ClockName = Literal["wall", "cpu"]
"""cpu: seconds of this process alone, for machines that are not quiet."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of repeated measurements: the median and where the middle half lies."""

    median: float
    quartile_1: float
    quartile_3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """At least one value."""
        low, middle, high = np.percentile(values, [25, 50, 75])
        return cls(median=float(middle), quartile_1=float(low), quartile_3=float(high))


class PhaseClock:
    """Observes an engine. On CUDA by events, which the device reaches in its own time; else by the host's clock."""

    def __init__(self, device: torch.device, name: ClockName = "wall", *, ranks: int = 1) -> None:
        """Raises: ConfigError for seconds of the CPU where they are not those that a step takes."""
        if name == "cpu" and device.type != "cpu":
            raise ConfigError(f"the cpu clock sees no work of a {device.type} device: leave --clock out")
        if name == "cpu" and torch.get_num_threads() > 1:
            raise ConfigError(
                f"the cpu clock adds up the seconds of {torch.get_num_threads()} threads, which is no time that a "
                "step takes: set OMP_NUM_THREADS=1, or leave --clock out"
            )
        if name == "cpu" and ranks > 1:
            raise ConfigError(
                f"the cpu clock sees none of the time that a rank waits for others, and there are {ranks}: leave "
                "--clock out, or measure on one rank"
            )
        self._is_cuda = device.type == "cuda"
        self.now = time.process_time if name == "cpu" else time.perf_counter
        self._marks: list[tuple[Phase, Any]] = []

    def __call__(self, phase: Phase) -> None:
        """The phase ends here."""
        if self._is_cuda:
            new_event: Any = torch.cuda.Event  # has no annotations
            event = new_event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, self.now()))

    def take(self) -> list[tuple[Phase, float]]:
        """Seconds of each phase since `begin`, in order, and forgets them. A CUDA device must have done its work."""
        marks, self._marks = self._marks, []
        return [(phase, self._between(before, mark)) for (_, before), (phase, mark) in pairwise(marks)]

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) / 1000.0 if self._is_cuda else after - before


class PeakMemory:
    """Most memory held at once: what torch allocated on a CUDA device, else the resident memory of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Begins again, where the system can do that."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # no Linux, or a sandbox: the peak is that of the whole process then

    def bytes(self) -> int:
        """Since the last reset."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
