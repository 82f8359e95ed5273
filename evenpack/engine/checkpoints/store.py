"""The checkpoints of one run: all ranks write (`saving.py`, `background.py`) and read (`loading.py`) them together."""

from collections.abc import Callable
from pathlib import Path

from evenpack.engine.checkpoints.background import BackgroundWriter
from evenpack.engine.checkpoints.files import Checkpoint, TrainState
from evenpack.engine.checkpoints.keeping import KeepPolicy
from evenpack.engine.checkpoints.loading import LoadableEngine, load_checkpoint, newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, WritingEngine
from evenpack.engine.world.distributed import World


class CheckpointStore:
    """The checkpoints of one run, in a directory that all ranks see; every method is called by all ranks."""

    def __init__(
        self, directory: Path, world: World, *, keep: int, every_hours: float | None = None, best: bool = False
    ) -> None:
        """The last three are the fields of `KeepPolicy`: the number of newest, and which others are kept."""
        self._directory = directory
        self._world = world
        policy = KeepPolicy(newest=keep, every_hours=every_hours, best=best)
        self._writer = CheckpointWriter(directory, world, policy)
        self.background = BackgroundWriter(self._writer, world)
        """Writes checkpoints while training continues."""

    def save(self, engine: WritingEngine, state: TrainState) -> Checkpoint:
        """Writes a checkpoint, as `CheckpointWriter.save` does."""
        return self._writer.save(engine, state)

    def newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, as `newest_whole` does."""
        return newest_whole(self._directory, self._world)

    def load(
        self, engine: LoadableEngine, checkpoint: Checkpoint, *, on_conversion: Callable[[], None] = lambda: None
    ) -> None:
        """Loads a checkpoint that `newest` returned, as `load_checkpoint` does."""
        load_checkpoint(engine, checkpoint, self._world, on_conversion=on_conversion)
        self._writer.resumed_at(checkpoint.step)
