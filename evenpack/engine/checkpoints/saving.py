"""Writes checkpoints with all ranks, so that a kill at any moment leaves a complete one.

DeepSpeed writes straight to final names and points `latest` at a checkpoint before all of it is on disk. Here it
writes into a hidden directory; all ranks flush and checksum the files; a manifest completes the set; one rename makes
it a checkpoint. Then `latest` is updated, and checkpoints that are no longer kept are removed.
"""

import logging
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.activity import doing
from evenpack.engine.checkpoints.files import (
    LATEST,
    PARTIAL,
    REPLACED,
    UNIVERSAL,
    Checkpoint,
    FileRecord,
    TrainState,
    checkpoint_by_size,
    checkpoint_name,
    commit_files,
    find_candidates,
    find_leftovers,
    find_wrong_content,
    hidden,
    list_files,
    remove_checkpoint,
    step_of,
    write_manifest,
)
from evenpack.engine.ownership import WRITER, require_owned
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError, SaveError, UnjudgedCheckpointError
from evenpack.files import fsync_directory, write_text

log = logging.getLogger(__name__)

DeferredWrites = Mapping[Path, Callable[[], object]]
"""Files that are to be written, and what writes each of them."""


@runtime_checkable
class WritingEngine(Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that writes its own files."""

    checkpoint_engine: Any
    """DeepSpeed's checkpoint engine, whose `save(state_dict, path)` writes one file."""

    def save_checkpoint(self, save_dir: str, *, tag: str, client_state: dict[str, Any], save_latest: bool) -> Any: ...


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


class CheckpointWriter:
    """Writes the checkpoints of one run into a directory that all ranks see; `save` is called by all ranks.

    Every change that others see is made by rank 0, and only while the output directory is this start's
    (`ownership.py`).
    """

    def __init__(self, directory: Path, world: World, policy: KeepPolicy, *, steps_done: int | None = None) -> None:
        """`steps_done`: number of the checkpoint from which the run goes on, 0 without one; later ones were broken.

        None: whatever lies there belongs to the steps before the first that is saved.
        """
        self._directory = directory
        self.world = world
        self._policy = policy
        self._steps_done = steps_done
        self._saved_steps: set[int] = set()
        """Steps whose checkpoints this start has saved."""
        self._left_alone: set[Path] = set()
        """Checkpoints of which a warning has said so."""

    def save(self, engine: WritingEngine, state: TrainState) -> Checkpoint:
        """Writes a checkpoint of DeepSpeed's engine, and returns once it is on disk under its name, on all ranks.

        Checkpoints that the policy does not keep are removed, and so are its own checkpoints of later steps: a run that
        reached this step again does not need them. Those that another process has written since stay.

        Raises: SaveError on every rank alike if it cannot be written; the older checkpoints stay as they were, and what
            was written of this one is removed. RunError if another start has taken the directory.
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
        # A name of its own: a stopped rank of an earlier start may go on to write into the directory of its save.
        name = self.world.broadcast(f"{uuid.uuid4().hex}.{PARTIAL}")
        partial = self._directory / hidden(checkpoint_name(state.step), name)
        try:
            self.world.on_main(lambda: self._begin(partial))
            yield partial
        except SaveError:
            self.world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    def call_deepspeed(
        self, engine: WritingEngine, partial: Path, state: TrainState, copy: Callable[[Any], Any] | None = None
    ) -> DeferredWrites:
        """Lets DeepSpeed save into the directory; for all ranks. Raises: SaveError if a rank cannot write.

        Args:
            copy: of a file's content; None: files are written at once.

        Returns: the files that remain to be written, from copies of their content.
        """
        from evenpack.engine.checkpoints.checkpoint_engine import steered

        with self.world.together(), self.explaining_failures(), steered(engine).saving(copy) as writes:
            # With the tag "." DeepSpeed's recovery scripts go into the same directory instead of the one above.
            client_state = {"train_state": state.to_json()}
            engine.save_checkpoint(str(partial), tag=".", client_state=client_state, save_latest=False)
        return writes

    def publish(self, partial: Path, state: TrainState, files: Sequence[FileRecord]) -> Checkpoint:
        """Makes a directory whose files are on disk a checkpoint, and removes obsolete ones; for rank 0 alone.

        Raises: SaveError if the manifest cannot be written; RunError if another start has taken the directory.
        """
        final = self._directory / checkpoint_name(state.step)
        with self.explaining_failures():
            _require_files(partial, files)
            write_manifest(partial, state, files)
            if final.exists():
                # No rename swaps two directories, so the old one is moved aside to where `find_candidates` finds it.
                aside = final.with_name(hidden(final.name, REPLACED))
                self._require_owned()
                shutil.rmtree(aside, ignore_errors=True)
                self._rename(final, aside)
            self._rename(partial, final)
            fsync_directory(self._directory)
        self._saved_steps.add(state.step)
        # From here on the checkpoint is complete, and older ones must go, or a full disk would stay full.
        obsolete: list[Path] = []
        newest = final
        with _only_warning(final):
            obsolete, newest = self._judge(final, step=state.step)
        with _only_warning(final):
            self._write_latest(newest)
        for path in obsolete:
            with _only_warning(final):
                self._require_owned()
                if not remove_checkpoint(path, rename=self._rename):
                    log.warning("could not delete all of %s; the next save will try again", path)
        log.info("saved checkpoint %s", final)
        return Checkpoint(path=final, state=state, files=tuple(files))

    def _begin(self, partial: Path) -> None:
        with self.explaining_failures():
            self._require_owned()
            shutil.rmtree(self._directory / UNIVERSAL, ignore_errors=True)  # all have loaded it, and it is large
            for earlier in find_leftovers(self._directory):  # gives room, as one save is in flight at a time
                if earlier.name.endswith(PARTIAL):
                    self._require_owned()
                    remove_checkpoint(earlier)
            partial.mkdir(parents=True)
            fsync_directory(self._directory.parent)

    def _commit_files(self, partial: Path) -> list[FileRecord]:
        """Flushes and checksums the files, each rank a part of them; returns the records of all."""
        names = self.world.on_main(lambda: self._list_files(partial))
        with self.world.together(), self.explaining_failures():
            records = commit_files(partial, names[self.world.rank :: self.world.size])
            doing.enter("waiting for a save")
        return [record for share in self.world.all_gather(records) for record in share]

    def _list_files(self, partial: Path) -> list[str]:
        with self.explaining_failures():
            return list_files(partial)

    def _judge(self, newest: Path, *, step: int) -> tuple[list[Path], Path]:
        """Returns what is to be removed: what the policy does not keep, and what is broken; and the newest that stays.

        What cannot be judged stays, and so does what another process has written since this start.
        """
        leftovers = find_leftovers(self._directory)
        candidates = [path for path in find_candidates(self._directory) if path not in leftovers]
        whole, kept = [], [newest]
        for path in candidates:
            try:
                found = checkpoint_by_size(path)
                if found is None:
                    continue
                if not self._is_known(found, step) and self._is_foreign(found):
                    self._leave_alone(path, "this start has neither written nor read it")
                    kept.append(path)
            except UnjudgedCheckpointError as error:
                self._leave_alone(path, str(error))
                kept.append(path)
            else:
                # It lies on the way to this step, unlike one that the resume has passed over.
                whole += [found] if found.step <= step and self._is_known(found, step) else []
        kept += [checkpoint.path for checkpoint in self._policy.kept(whole)]
        obsolete = sorted({*leftovers, *candidates} - {*kept})
        return obsolete, max(kept, key=lambda path: step_of(path) or 0)

    def _is_known(self, found: Checkpoint, step: int) -> bool:
        """Returns whether this start has read a checkpoint, has written it, or was there before the run's steps."""
        was_there = found.step <= (step if self._steps_done is None else self._steps_done)
        return was_there or found.step in self._saved_steps

    def _is_foreign(self, unknown: Checkpoint) -> bool:
        """Returns whether a checkpoint is another process's: it is complete, other than one that was passed over."""
        return unknown.path in self._left_alone or find_wrong_content(unknown, unknown.files) is None

    def _leave_alone(self, path: Path, reason: str) -> None:
        if path not in self._left_alone:
            self._left_alone.add(path)
            log.warning("%s is left alone: %s", path, reason)

    def _require_owned(self) -> None:
        require_owned(self._directory.parent)

    def _rename(self, path: Path, target: Path) -> None:
        """Renames within the directory; undone if another start has taken it between the look and the renaming.

        So a process that is stopped there, and woken later, loses nothing where a file system has no locks. A start
        that came after the renaming, by the times of the file system, has found the new name, and keeps it.
        """
        self._require_owned()
        path.rename(target)
        try:
            self._require_owned()
        except RunError:
            with suppress(OSError):
                if (self._directory.parent / WRITER).stat().st_mtime_ns <= target.stat().st_ctime_ns:
                    target.rename(path)
            raise

    def _write_latest(self, newest: Path) -> None:
        """Writes the name of the newest checkpoint; of the other start's newest, if one has taken the directory."""
        write_text(self._directory / LATEST, f"{newest.name}\n", check=self._require_owned)
        try:
            self._require_owned()
        except RunError:
            write_text(self._directory / LATEST, f"{find_candidates(self._directory)[0].name}\n")
            raise

    @contextmanager
    def explaining_failures(self) -> Iterator[None]:
        """Makes a failure to write a SaveError with this rank's place and its cause."""
        try:
            yield
        except (OSError, RuntimeError, UnjudgedCheckpointError) as error:
            raise SaveError(
                f"rank {self.world.rank} on {socket.gethostname()} failed while saving a checkpoint into "
                f"{self._directory} ({free_space(self._directory)}): {error}. Older "
                "checkpoints are untouched. Remove the cause; a run that has ended continues from the newest by the "
                "same command"
            ) from error


@contextmanager
def _only_warning(checkpoint: Path) -> Iterator[None]:
    """Makes a failure after a checkpoint is complete a warning."""
    try:
        yield
    except (OSError, UnjudgedCheckpointError) as error:
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


def free_space(directory: Path) -> str:
    """Describes the free space of a disk, for messages."""
    try:
        return f"{shutil.disk_usage(directory).free / 1e9:.1f} GB free there"
    except OSError:
        return "free space unknown"
