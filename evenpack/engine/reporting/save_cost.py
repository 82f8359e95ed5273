"""What saving checkpoints costs a run, for metrics.jsonl and summary.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one save has cost; seconds are those of rank 0."""

    step: int
    """The step after which it was saved."""
    pause_seconds: float
    """Time for which training stood still."""
    seconds: float | None
    """Time until it was whole on disk, and obsolete ones were removed; None if it could not be written."""
    bytes: int
    """Size of all its files; 0 if it could not be written."""

    def to_json(self) -> dict[str, Any]:
        """Returns the values of `checkpoint` in a step's record."""
        values = {"step": self.step, "pause_seconds": self.pause_seconds}
        if self.seconds is None:
            return values | {"failed": 1}
        return values | {"seconds": self.seconds, "bytes": self.bytes}


def save_totals(records: Sequence[dict[str, Any]], unrecorded: Sequence[SaveCost]) -> dict[str, Any]:
    """Returns the costs of all saves of a run.

    `unrecorded`: those after whose end there was no step. The last save of an earlier start is in no record, so it is
    left out.
    """
    saves = [record["checkpoint"] for record in records if record.get("checkpoint")]
    saves += [cost.to_json() for cost in unrecorded]
    pause_seconds = sum(save["pause_seconds"] for save in saves)
    others = sum(record.get("step_seconds", 0.0) + (record.get("evaluation_seconds") or 0.0) for record in records)
    seconds = others + pause_seconds
    return {
        "saved": sum("failed" not in save for save in saves),
        "failed": sum("failed" in save for save in saves),
        "bytes": sum(save.get("bytes", 0) for save in saves),
        "pause_seconds": pause_seconds,
        "pause_share": pause_seconds / seconds if seconds else 0.0,
    }
