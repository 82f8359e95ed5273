"""DeepSpeed's checkpoint engine, through which its own engine writes and reads each file of a checkpoint.

DeepSpeed chooses one by its configuration and knows no others, so `steered` puts this one in the place of that which an
engine has. To import this module is to import DeepSpeed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from evenpack.engine.activity import doing
from evenpack.engine.checkpoints.saving import DeferredWrites


class SteeredFiles(CheckpointEngine):  # type: ignore[misc]
    """Writes and reads files by another checkpoint engine, at once or later, and lets no failure stop a save."""

    def __init__(self, files: Any) -> None:
        super().__init__()
        self.files = files
        self._copy: Callable[[Any], Any] | None = None
        self._deferred: dict[Path, Callable[[], object]] = {}
        self._problems: list[BaseException] = []

    @contextmanager
    def saving(self, copy: Callable[[Any], Any] | None) -> Iterator[DeferredWrites]:
        """Lets DeepSpeed's save go through its barriers on a rank that cannot write; its error is raised afterwards.

        Otherwise the other ranks would wait for it in the next barrier.

        Args:
            copy: of a file's content, which is then not written: what the block is given grows by the file instead.
                None: files are written at once.
        """
        self._copy, self._deferred, self._problems = copy, {}, []
        yield self._deferred
        if self._problems:
            raise self._problems.pop(0)

    @contextmanager
    def keeping_failures(self) -> Iterator[None]:
        """Keeps a failure to write for the end of the save."""
        try:
            yield
            doing.tick()  # a file
        except (OSError, RuntimeError) as error:
            error.__context__ = None  # frames would keep the open file, whose space would not be free
            self._problems.append(error.with_traceback(None))

    def save(self, state_dict: Any, path: str) -> None:
        with self.keeping_failures():
            if self._copy is None:
                self.files.save(state_dict, path)
            else:
                self._deferred[Path(path)] = partial(self.files.save, self._copy(state_dict), path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.files.load(path, map_location=map_location)

    def create(self, info: Any) -> None:
        """Does nothing: `CheckpointWriter` has made the directory."""

    def commit(self, info: Any) -> bool:
        """Does nothing: `CheckpointWriter` makes the files a checkpoint."""
        return True


def steered(engine: Any) -> SteeredFiles:
    """Returns the checkpoint engine of DeepSpeed's engine, which it has from the first call on."""
    files = engine.checkpoint_engine
    if not isinstance(files, SteeredFiles):
        files = engine.checkpoint_engine = SteeredFiles(files)
        # Rank 0 copies scripts beside the files, by no checkpoint engine: a full disk would stop it before a barrier.
        engine._copy_recovery_script = files.keeping_failures()(engine._copy_recovery_script)
    return files
