"""Measures seconds of the phases of a step, its peak of memory, and the spread of values."""

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
from evenpack.studies.statistics.paired import clearly_lowest

ClockName = Literal["wall", "cpu"]
"""Names of clocks; cpu is seconds of this process only, for busy machines."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated measurements: the median and the middle half."""

    median: float
    quartile_1: float
    quartile_3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarises at least one value."""
        low, middle, high = np.percentile(values, [25, 50, 75])
        return cls(median=float(middle), quartile_1=float(low), quartile_3=float(high))


def clear_winner(spreads: Sequence[Spread]) -> int | None:
    """Returns the index of the highest median whose middle half overlaps no other one; None if there is none.

    A single spread has nothing to win over.
    """
    return clearly_lowest([(-spread.quartile_3, -spread.quartile_1) for spread in spreads])


class PhaseClock:
    """Observes an engine: on CUDA by events, which are recorded asynchronously; otherwise by the host's clock."""

    def __init__(self, device: torch.device, name: ClockName = "wall", *, ranks: int = 1) -> None:
        """Checks the clock. Raises: ConfigError if the seconds of the CPU are not those of a step."""
        if name == "cpu" and device.type != "cpu":
            raise ConfigError(f"the cpu clock sees no work of a {device.type} device: leave --clock out")
        if name == "cpu" and torch.get_num_threads() > 1:
            raise ConfigError(
                f"the cpu clock adds up the seconds of {torch.get_num_threads()} threads, which is not the "
                "duration of a step: set OMP_NUM_THREADS=1, or leave --clock out"
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
            return  # no Linux, or a sandbox: the peak is then that of the whole process

    def bytes(self) -> int:
        """Returns the peak since the last reset."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
