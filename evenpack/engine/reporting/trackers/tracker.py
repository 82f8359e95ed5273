"""Defines the protocol of a tracker and the description of the run that it logs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.reporting.metrics import METRICS, read_metrics


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of each step; an error in it does not stop the run."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the metrics of a step, by `group/name`; steps are in ascending order."""
        ...

    def flush(self) -> None:
        """Flushes to disk; called before a checkpoint of this step is saved."""
        ...

    def close(self, *, failed: bool) -> None:
        """Closes the tracker; `failed`: the run ends with an error."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run as it begins or resumes; its metrics.jsonl is truncated to that step."""

    name: str
    output_dir: Path
    config: dict[str, Any]
    """The resolved run file, as JSON values."""
    first_step: int
    """Number of updates done before."""

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of the steps up to `first_step`, for a tracker that does not have them."""
        return read_metrics(self.output_dir / METRICS)
