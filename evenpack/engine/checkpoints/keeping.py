"""Which checkpoints of a run are kept: the newest, and those of some steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack.engine.checkpoints.files import Checkpoint, find_candidates, find_wrong_size, manifest_or_problem


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Rules for keeping checkpoints; a checkpoint is kept if any of them names it."""

    newest: int
    """Number of newest checkpoints to keep, at least 1: the run continues from the newest."""
    steps: frozenset[int] = frozenset()
    """Keep the checkpoints of these steps."""

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ValueError(f"newest must be at least 1, not {self.newest}")

    def kept(self, whole: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Returns the complete checkpoints of a run that are kept, by step."""
        ascending = sorted(whole, key=lambda checkpoint: checkpoint.step)
        steps = {checkpoint.step for checkpoint in ascending[-self.newest :]} | self.steps
        return [checkpoint for checkpoint in ascending if checkpoint.step in steps]


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
