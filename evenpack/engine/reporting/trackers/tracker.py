"""What a tracker is, and what it must know to begin or to go on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.reporting.metrics import METRICS, read_metrics


@runtime_checkable
class Tracker(Protocol):
    """Takes the numbers of each step; it may fail at any time without harm to the run."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Adds the numbers of a step, by `group/name`; steps rise."""
        ...

    def flush(self) -> None:
        """Puts on disk what a checkpoint of this step will rely on."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the tracker; `failed`: the run ends on an error."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run as it begins or goes on, its metrics.jsonl cut back to where that is."""

    name: str
    output_dir: Path
    config: dict[str, Any]
    """The resolved run file, as JSON values."""
    first_step: int
    """Updates done before."""

    def records(self) -> list[dict[str, Any]]:
        """The steps up to `first_step`, for a tracker that does not have them."""
        return read_metrics(self.output_dir / METRICS)
