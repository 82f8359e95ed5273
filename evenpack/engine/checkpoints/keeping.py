"""Which checkpoints of a run are kept: the newest, those of some steps, one every so many hours, and the best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpack.engine.checkpoints.files import Checkpoint, find_candidates, find_wrong_size, manifest_or_problem
from evenpack.errors import CheckpointError

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Rules for keeping checkpoints; a checkpoint is kept if any of them names it."""

    newest: int
    """Number of newest checkpoints to keep, at least 1: the run continues from the newest."""
    steps: frozenset[int] = frozenset()
    """Keep the checkpoints of these steps."""
    every_hours: float | None = None
    """Keep the oldest, and each that was saved at least so many hours after the one before it that this rule keeps."""
    best: bool = False
    """Keep the checkpoint of the lowest validation loss."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ValueError(f"newest must be at least 1, not {self.newest}")

    def kept(self, whole: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns the complete checkpoints of a run that are kept, by step.

        What `every_hours` keeps it still keeps when others have been removed and newer ones added.
        """
        ascending = sorted(whole, key=lambda checkpoint: checkpoint.step)
        steps = {checkpoint.step for checkpoint in ascending[-self.newest :]} | self.steps
        if self.every_hours is not None:
            steps.update(_spaced(ascending, seconds=self.every_hours * _SECONDS_PER_HOUR))
        best = best_of(ascending) if self.best else None
        if best is not None:
            steps.add(best.step)
        return [checkpoint for checkpoint in ascending if checkpoint.step in steps]


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Returns the checkpoint of the lowest validation loss, of equal ones the newest; None if none was evaluated.

    They are those whose loss is of the same sources, weights and form of packs as the newest one's: in between a source
    may join, or sequences become longer.
    """
    evaluated = [
        (loss, -checkpoint.step, checkpoint)
        for checkpoint in checkpoints
        if (loss := checkpoint.state.validation_loss) is not None and math.isfinite(loss)
    ]
    if not evaluated:
        return None
    newest = max((checkpoint for *_, checkpoint in evaluated), key=lambda checkpoint: checkpoint.step)
    return min(one for one in evaluated if _judges(one[-1]) == _judges(newest))[-1]


def _judges(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Returns what a checkpoint's validation loss is a mean of: weights of sources, or all of them; and their form."""
    config = checkpoint.state.config
    built = [stage["built"] for stage in checkpoint.state.stages if "built" in stage]
    sources = config["training"].get("validation_weights") or sorted(config.get("data", {}).get("sources", ()))
    return sources, built[-1:]


def best_step(directory: Path) -> int:
    """Returns the step of the best checkpoint in a run's directory.

    Raises: CheckpointError if none was evaluated at its step.
    """
    best = best_of(whole_by_size(directory))
    if best is None:
        raise CheckpointError(
            f"{directory} holds no checkpoint with a validation loss, so none is the best: a checkpoint has one if the "
            "model is evaluated after the same step (training.evaluate_every_steps). Name a step instead"
        )
    return best.step


def whole_by_size(directory: Path) -> list[Checkpoint]:
    """Returns the checkpoints whose files have the right sizes: reading all bytes at each save would be slow.

    Raises: UnjudgedCheckpointError.
    """
    found = (checkpoint_by_size(path) for path in find_candidates(directory))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def checkpoint_by_size(path: Path) -> Checkpoint | None:
    """Returns the checkpoint at `path`; None if its manifest is damaged, or a file is missing or of another size.

    Raises: UnjudgedCheckpointError if that cannot be told: it may be complete all the same.
    """
    checkpoint, _ = manifest_or_problem(path)
    return checkpoint if checkpoint is not None and find_wrong_size(checkpoint) is None else None


def _spaced(ascending: Sequence[Checkpoint], *, seconds: float) -> list[int]:
    """Returns the steps of the oldest checkpoint and of those so far apart."""
    steps: list[int] = []
    last = -math.inf
    for checkpoint in ascending:
        # A time before the last one is of a clock that was wrong: it may keep one too many, never too few.
        if not 0 <= checkpoint.saved_at - last < seconds:
            steps.append(checkpoint.step)
            last = checkpoint.saved_at
    return steps
