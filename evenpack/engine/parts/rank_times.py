"""Measures each rank's compute time and work, for studies of how long ranks wait for each other (`study imbalance`).

The record of a step has only the mean and maximum over ranks. Each rank keeps sums of its own, which are gathered once
in many steps.
"""

import math
from collections.abc import Sequence
from typing import Any

from evenpack.batch import PackedBatch
from evenpack.engine.parts.part import Part, Step
from evenpack.engine.world.distributed import World

_DIGITS = 6
"""Decimal places of seconds; the clock is no more precise."""


class RankTimes(Part):
    """Accumulates this rank's compute time and work since they were last gathered."""

    def __init__(self, world: World, *, every_steps: int | None) -> None:
        """They are gathered every so many steps, and at the end; None: never."""
        self._world = world
        self._every_steps = every_steps
        self._begin()

    def after_step(self, step: Step) -> None:
        if step.update is not None:
            self.add(step.update.batches.micro_batches, step.update.local.stopwatch.seconds())

    def recording(self, step: Step) -> None:
        is_due = self._every_steps is not None and (step.ends_loop or step.number % self._every_steps == 0)
        if is_due and self._seconds:
            step.rank_times = self.gather()

    def add(self, micro_batches: Sequence[PackedBatch], compute_seconds: float) -> None:
        """Adds a step of this rank."""
        self._seconds.append(compute_seconds)
        self._sequences += sum(batch.local_counts.sequences for batch in micro_batches)
        self._tokens += sum(batch.local_counts.tokens for batch in micro_batches)
        self._slots += sum(batch.slots for batch in micro_batches)
        self._squared_lengths += sum(batch.squared_lengths for batch in micro_batches)
        for batch in micro_batches:
            for window, pairs in batch.pairs_within.items():
                self._pairs_within[window] = self._pairs_within.get(window, 0) + pairs

    def gather(self) -> dict[str, Any]:
        """Returns the values of all ranks since the last call, and resets them; all ranks call it after a step or more.

        Each value but `steps` is a list in the order of ranks, or one for each window of the model. The values are sums
        over these steps; for `compute_seconds` there are also the longest step and the population standard deviation
        over steps.
        """
        steps, total = len(self._seconds), math.fsum(self._seconds)
        deviation = math.sqrt(math.fsum((one - total / steps) ** 2 for one in self._seconds) / steps)
        mine = {
            "compute_seconds": round(total, _DIGITS),
            "compute_seconds_max": round(max(self._seconds), _DIGITS),
            "compute_seconds_deviation": round(deviation, _DIGITS),
            "sequences": self._sequences,
            "tokens": self._tokens,
            "slots": self._slots,
            "squared_lengths": self._squared_lengths,
        }
        within = self._pairs_within
        self._begin()
        ranks, pairs = zip(*self._world.all_gather((mine, within)), strict=True)
        values: dict[str, Any] = {name: [rank[name] for rank in ranks] for name in mine}
        if within:
            values["pairs_within"] = {str(window): [rank[window] for rank in pairs] for window in within}
        return {"steps": steps, **values}

    def _begin(self) -> None:
        self._seconds: list[float] = []
        self._sequences = self._tokens = self._slots = self._squared_lengths = 0
        self._pairs_within: dict[int, int] = {}
