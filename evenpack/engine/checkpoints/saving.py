"""Writes checkpoints with all ranks, so that a kill at any moment leaves a complete one.

DeepSpeed writes straight to final names and points `latest` at a checkpoint before all of it is on disk. Here it
writes into a hidden directory; all ranks flush and checksum the files; a manifest completes the set; one rename makes
it a checkpoint. Then `latest` is updated, and checkpoints that are no longer kept are removed.
"""

import logging
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from unittest import mock

from evenpack.engine.activity import own_work
from evenpack.engine.checkpoints.files import (
    LATEST,
    PARTIAL,
    REPLACED,
    UNIVERSAL,
    Checkpoint,
    FileRecord,
    TrainState,
    checkpoint_name,
    commit_files,
    find_candidates,
    find_leftovers,
    hidden,
    list_files,
    remove_checkpoint,
    write_manifest,
)
from evenpack.engine.checkpoints.keeping import KeepPolicy, checkpoint_by_size
from evenpack.engine.world.distributed import World
from evenpack.errors import SaveError
from evenpack.files import fsync_directory, write_text

log = logging.getLogger(__name__)


@runtime_checkable
class WritingEngine(Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that writes its own files."""

    checkpoint_engine: Any
    """Object whose `save(state_dict, path)` writes one file."""

    def save_checkpoint(self, save_dir: str, *, tag: str, client_state: dict[str, Any], save_latest: bool) -> Any: ...


class CheckpointWriter:
    """Writes the checkpoints of one run into a directory that all ranks see; `save` is called by all ranks."""

    def __init__(self, directory: Path, world: World, policy: KeepPolicy, *, resumed_step: int | None = None) -> None:
        """`resumed_step`: that of the checkpoint that was loaded, as later ones are broken, and count no more."""
        self._directory = directory
        self.world = world
        self._policy = policy
        self._resumed_step = resumed_step
        self._saved_steps: set[int] = set()
        """Steps whose checkpoints this start has saved."""

    def save(self, engine: WritingEngine, state: TrainState) -> Checkpoint:
        """Writes a checkpoint and returns once it is on disk under its name, on all ranks.

        Checkpoints that the policy does not keep are removed, and so are checkpoints of later steps: a run that reached
        this step again does not need them.

        Raises: SaveError on every rank alike if it cannot be written; the older checkpoints stay as they were, and what
            was written of this one is removed.
        """
        with self.partial_of(state) as partial:
            self.call_deepspeed(engine, partial, state)
            files = self._commit_files(partial)
            return self.world.on_main(lambda: self.publish(partial, state, files))

    @contextmanager
    def partial_of(self, state: TrainState) -> Iterator[Path]:
        """Makes the hidden directory of a save, which is removed if the block fails; for all ranks.

        Raises: SaveError if it cannot be made.
        """
        partial = self._directory / hidden(checkpoint_name(state.step), PARTIAL)
        try:
            self.world.on_main(lambda: self._begin(partial))
            yield partial
        except SaveError:
            self.world.on_main(lambda: self.discard(partial))
            raise

    def call_deepspeed(self, engine: WritingEngine, partial: Path, state: TrainState) -> None:
        """Lets DeepSpeed save into the directory; for all ranks. Raises: SaveError if a rank cannot write."""
        with self.world.together(), self.explaining_failures(), writing_to_the_end(engine):
            # With the tag "." DeepSpeed's recovery scripts go into the same directory instead of the one above.
            client_state = {"train_state": state.to_json()}
            engine.save_checkpoint(str(partial), tag=".", client_state=client_state, save_latest=False)

    def publish(self, partial: Path, state: TrainState, files: Sequence[FileRecord]) -> Checkpoint:
        """Makes a directory whose files are on disk a checkpoint, and removes obsolete ones; for rank 0 alone.

        Raises: SaveError if the manifest cannot be written.
        """
        final = self._directory / checkpoint_name(state.step)
        with self.explaining_failures():
            _require_files(partial, files)
            saved_at = write_manifest(partial, state, files)
            if final.exists():
                # No rename swaps two directories, so the old one is moved aside to where `find_candidates` finds it.
                aside = final.with_name(hidden(final.name, REPLACED))
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            partial.rename(final)
            fsync_directory(self._directory)
        self._saved_steps.add(state.step)
        # From here on the checkpoint is complete, and older ones must go, or a full disk would stay full.
        with _only_warning(final):
            write_text(self._directory / LATEST, f"{final.name}\n")
        with _only_warning(final):
            self._remove_obsolete(final, step=state.step)
        log.info("saved checkpoint %s", final)
        return Checkpoint(path=final, state=state, files=tuple(files), saved_at=saved_at)

    def discard(self, partial: Path) -> None:
        """Removes what was written of a failed save; for rank 0 alone."""
        shutil.rmtree(partial, ignore_errors=True)

    def _begin(self, partial: Path) -> None:
        with self.explaining_failures():
            shutil.rmtree(self._directory / UNIVERSAL, ignore_errors=True)  # all have loaded it, and it is large
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            fsync_directory(self._directory.parent)

    def _commit_files(self, partial: Path) -> list[FileRecord]:
        """Flushes and checksums the files, each rank a part of them; returns the records of all."""
        names = self.world.on_main(lambda: self._list_files(partial))
        with self.world.together(), self.explaining_failures(), own_work("flushing its part of the checkpoint"):
            records = commit_files(partial, names[self.world.rank :: self.world.size])
        return [record for share in self.world.all_gather(records) for record in share]

    def _list_files(self, partial: Path) -> list[str]:
        with self.explaining_failures():
            return list_files(partial)

    def _remove_obsolete(self, newest: Path, *, step: int) -> None:
        """Removes what the policy does not keep, and what is broken; a checkpoint that cannot be judged stays."""
        leftovers = find_leftovers(self._directory)
        candidates = [path for path in find_candidates(self._directory) if path not in leftovers]
        whole, kept = [], {newest}
        for path in candidates:
            try:
                found = checkpoint_by_size(path)
            except OSError as error:
                log.warning("%s cannot be read and is left alone: %s", path, error)
                kept.add(path)
            else:
                whole += [found] if found is not None and self._is_of_this_run(found, step) else []
        kept |= {checkpoint.path for checkpoint in self._policy.kept(whole)}
        for path in sorted({*leftovers, *candidates} - kept):
            if not remove_checkpoint(path):
                log.warning("could not delete all of %s; the next save will try again", path)

    def _is_of_this_run(self, found: Checkpoint, step: int) -> bool:
        """Returns whether a checkpoint lies on the way to this step: one that the resume has passed over does not."""
        was_there = self._resumed_step is None or found.step <= self._resumed_step
        return found.step <= step and (was_there or found.step in self._saved_steps)

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Makes a failure to write a SaveError with this rank's place; torch reports a full disk as RuntimeError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise SaveError(
                f"rank {self.world.rank} on {socket.gethostname()} failed while saving a checkpoint into "
                f"{self._directory} ({free_space(self._directory)}): {error}\n"
                "Older checkpoints are untouched. Remove the cause (is the disk full?); a run that has ended continues "
                "from the newest by the same command"
            ) from error


@contextmanager
def _only_warning(checkpoint: Path) -> Iterator[None]:
    """Makes a failure after a checkpoint is complete a warning."""
    try:
        yield
    except OSError as error:
        log.warning(
            "checkpoint %s is complete, but not all of %s is up to date: %s", checkpoint, checkpoint.parent, error
        )


def _require_files(partial: Path, files: Sequence[FileRecord]) -> None:
    """Checks that no file has gone since its rank wrote it: complete checkpoints are removed for the new one.

    Raises: OSError naming the first.
    """
    for record in files:
        path = partial / record.name
        found = path.stat().st_size
        if found != record.size:
            raise OSError(f"{path} was written with {record.size:,} bytes and has {found:,} now")


@contextmanager
def writing_to_the_end(engine: Any) -> Iterator[None]:
    """Lets DeepSpeed's save go through its barriers on a rank that cannot write; its error is raised afterwards.

    Otherwise the other ranks would wait for it in the next barrier.
    """
    problems: list[str] = []  # an exception would keep the open file, whose space would not be free

    def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
        def try_to_write(*arguments: Any, **named: Any) -> Any:
            try:
                with own_work("writing its part of the checkpoint"):
                    return write(*arguments, **named)
            except (OSError, RuntimeError) as error:
                problems.append(str(error))
                return None

        return try_to_write

    with ExitStack() as patched:
        for holder, name in ((getattr(engine, "checkpoint_engine", None), "save"), (engine, "_copy_recovery_script")):
            if hasattr(holder, name):
                patched.enter_context(mock.patch.object(holder, name, guarded(getattr(holder, name))))
        yield
    if problems:
        raise OSError(problems[0])


def free_space(directory: Path) -> str:
    """Describes the free space of a disk, for messages."""
    try:
        return f"{shutil.disk_usage(directory).free / 1e9:.1f} GB free there"
    except OSError:
        return "free space unknown"
