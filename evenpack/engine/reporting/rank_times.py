"""What each rank did by itself, for studies of how ranks wait for one another (`study imbalance`).

A step tells only the ranks' mean and maximum. Their own sums are kept on each rank and gathered once in many steps.
"""

import math
from collections.abc import Sequence
from typing import Any

from evenpack.batch import PackedBatch
from evenpack.engine.distributed import World

_DIGITS = 6
"""Of seconds; a clock knows no more."""


class RankTimes:
    """This rank's compute time and the work behind it, since it was last gathered."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begin()

    def add(self, micro_batches: Sequence[PackedBatch], compute_seconds: float) -> None:
        """Notes a step of this rank."""
        self._seconds.append(compute_seconds)
        self._sequences += sum(batch.local_counts.sequences for batch in micro_batches)
        self._tokens += sum(batch.local_counts.tokens for batch in micro_batches)
        self._slots += sum(batch.slots for batch in micro_batches)
        self._squared_lengths += sum(batch.squared_lengths for batch in micro_batches)

    @property
    def is_empty(self) -> bool:
        """Whether no step was noted since the last time; the same on every rank."""
        return not self._seconds

    def gather(self) -> dict[str, Any]:
        """All ranks' since the last time, and begins again; every rank calls it, after one step or more.

        Each value is a list in the order of ranks, but `steps`, which all of them did. Sums over these steps, and of
        `compute_seconds` also the longest step and the standard deviation over steps (of all of them, not a sample).
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
        self._begin()
        ranks = self._world.all_gather(mine)
        return {"steps": steps, **{name: [rank[name] for rank in ranks] for name in mine}}

    def _begin(self) -> None:
        self._seconds: list[float] = []
        self._sequences = self._tokens = self._slots = self._squared_lengths = 0
