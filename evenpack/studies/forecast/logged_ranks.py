"""The waiting of ranks in the log of a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class LoggedRanks:
    """The mean times of a real run's ranks."""

    ranks: int
    steps: int
    mean_seconds: float
    slowest_seconds: float

    @property
    def wait(self) -> float:
        """Slowest rank / mean of the ranks."""
        return self.slowest_seconds / self.mean_seconds


def read_logged_ranks(records: Sequence[Mapping[str, Any]], *, warmup: int) -> LoggedRanks:
    """Reads a run's metrics.jsonl, without its first `warmup` steps.

    Raises: DataError if no step is left, the number of ranks is one or unknown, or a step has no seconds.
    """
    ranks = next((len(each) for record in records if (each := _seconds_of_ranks(record)) is not None), None)
    if ranks is None:
        raise DataError(
            "the log does not contain the number of ranks: set training.log_rank_times_every_steps in the run"
        )
    if ranks < 2:
        raise DataError("the log is of a run on one rank, which waits for no other: give one of 2 or more")
    kept = records[warmup:]
    if not kept:
        raise DataError(f"the log has {len(records)} steps, and the first {warmup} are left out")
    return LoggedRanks(
        ranks=ranks,
        steps=len(kept),
        mean_seconds=float(np.mean([_seconds(record, "compute_seconds_mean") for record in kept])),
        slowest_seconds=float(np.mean([_seconds(record, "compute_seconds_max") for record in kept])),
    )


def _seconds_of_ranks(record: Mapping[str, Any]) -> list[Any] | None:
    """Returns the seconds of the ranks; None in a record without single ranks."""
    ranks = record.get("ranks")
    seconds = ranks.get("compute_seconds") if isinstance(ranks, dict) else None
    return seconds if isinstance(seconds, list) else None


def _seconds(record: Mapping[str, Any], name: str) -> float:
    """Returns a time of a record. Raises: DataError for anything but a positive number."""
    value = record.get(name)
    if not isinstance(value, int | float) or not value > 0:
        raise DataError(
            f"the log's step {record.get('step')} must have a {name} above 0, found {value!r}: give the metrics.jsonl "
            "of a run of this version"
        )
    return float(value)
