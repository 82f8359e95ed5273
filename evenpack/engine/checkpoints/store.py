"""Checkpoints that all ranks write and read together, so that a kill at any moment leaves a complete one.

DeepSpeed writes straight to final names and points `latest` at a checkpoint before all of it is on disk. Here it
writes into a hidden directory; all ranks flush and checksum the files; a manifest completes the set; one rename makes
it a checkpoint. Then `latest` is updated, and checkpoints that are no longer kept are removed.
"""

import logging
import pickle
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.checkpoints.failed_writes import free_space, writing_to_the_end
from evenpack.engine.checkpoints.files import (
    LATEST,
    PARTIAL,
    REPLACED,
    Checkpoint,
    FileRecord,
    TrainState,
    checkpoint_name,
    commit_files,
    find_candidates,
    find_leftovers,
    find_wrong_content,
    find_wrong_size,
    hidden,
    list_files,
    read_manifest,
    remove_checkpoint,
    step_of,
    write_manifest,
)
from evenpack.engine.checkpoints.pickles import find_classes, forbidding_code
from evenpack.engine.distributed import World
from evenpack.engine.sharding import sharding_at
from evenpack.errors import CheckpointError, SaveError
from evenpack.files import fsync_directory, write_text

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run's output directory."""


@runtime_checkable
class CheckpointableEngine(Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that writes and reads its own files."""

    optimizer: Any
    """Object with torch's `param_groups`."""

    def save_checkpoint(self, save_dir: str, *, tag: str, client_state: dict[str, Any], save_latest: bool) -> Any: ...

    def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]: ...

    def zero_optimization_stage(self) -> int: ...


class CheckpointStore:
    """The checkpoints of one run, in a directory that all ranks see; every method is called by all ranks."""

    def __init__(self, directory: Path, world: World, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._directory = directory
        self._world = world
        self._keep = keep

    def save(self, engine: CheckpointableEngine, state: TrainState) -> Checkpoint:
        """Writes a checkpoint and returns once it is on disk under its name, on all ranks.

        Checkpoints beyond the newest `keep` are removed, and so are those of later steps: a run that reached this
        step again does not need them.

        Raises: SaveError on every rank alike if it cannot be written; the older checkpoints stay as they were, and what
            was written of this one is removed.
        """
        partial = self._directory / hidden(checkpoint_name(state.step), PARTIAL)
        try:
            self._world.on_main(lambda: self._begin(partial))
            with self._writing_together(), writing_to_the_end(engine):
                # With the tag "." DeepSpeed's recovery scripts go into the same directory instead of the one above.
                client_state = {"train_state": state.to_json()}
                engine.save_checkpoint(str(partial), tag=".", client_state=client_state, save_latest=False)
            files = self._commit_files(partial)
            checkpoint = self._world.on_main(lambda: self._publish(partial, state, files))
        except SaveError:
            self._world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise
        if self._world.is_main:
            log.info("saved checkpoint %s", checkpoint.path)
        return checkpoint

    def newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, as `newest_whole` does."""
        return newest_whole(self._directory, self._world)

    def load(self, engine: CheckpointableEngine, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint that `newest` returned into `engine`: module, optimizer and DeepSpeed's own counters.

        There are no random states to restore: data order and dropout are functions of the seed and the step. The
        optimizer's settings (weight decay, betas, ...) stay those of this run: torch would bring back the saved ones.

        Raises: CheckpointError if it does not fit this run's ranks, ZeRO stage, model or optimizer, or if one of its
        files requests code to be run; none is run.
        """
        self._require_fitting(engine, checkpoint)
        classes = self._require_plain(checkpoint)
        settings = [_without_parameters(group) for group in engine.optimizer.param_groups]
        try:
            with forbidding_code(classes):
                path, _ = engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
        except pickle.UnpicklingError as error:
            raise _refusal_of_code(checkpoint, f"a file of it cannot be read without running code ({error})") from error
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is complete, but does not fit this run's model or optimizer: {error}\n"
                "Restore the model and optimizer sections with which it was saved (they are in its manifest.json), "
                "or choose another run.output_dir to start again."
            ) from error
        if path is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {checkpoint.path}")
        for group, values in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(values)

    def _begin(self, partial: Path) -> None:
        with self._writing():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            fsync_directory(self._directory.parent)

    def _commit_files(self, partial: Path) -> list[FileRecord]:
        """Flushes and checksums the files, each rank a part of them; returns the records of all."""
        names = self._world.on_main(lambda: self._list_files(partial))
        with self._writing_together():
            records = commit_files(partial, names[self._world.rank :: self._world.size])
        return [record for share in self._world.all_gather(records) for record in share]

    def _list_files(self, partial: Path) -> list[str]:
        with self._writing():
            return list_files(partial)

    def _publish(self, partial: Path, state: TrainState, files: list[FileRecord]) -> Checkpoint:
        final = self._directory / checkpoint_name(state.step)
        with self._writing():
            write_manifest(partial, state, files)
            if final.exists():
                # No rename swaps two directories, so the old one is moved aside to where `find_candidates` finds it.
                aside = final.with_name(hidden(final.name, REPLACED))
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            partial.rename(final)
            fsync_directory(self._directory)
        # From here on the checkpoint is whole, and older ones must go, or a full disk would stay full.
        with _only_warning(final):
            write_text(self._directory / LATEST, f"{final.name}\n")
        with _only_warning(final):
            self._remove_obsolete(state.step)
        return read_manifest(final)

    def _remove_obsolete(self, step: int) -> None:
        obsolete = find_leftovers(self._directory)
        kept = 0
        for path in find_candidates(self._directory):
            if path in obsolete:
                continue
            if kept < self._keep and _looks_whole(path, newest_step=step):
                kept += 1
            else:
                obsolete.append(path)
        for path in obsolete:
            if not remove_checkpoint(path):
                log.warning("could not delete all of %s; the next save will try again", path)

    def _require_fitting(self, engine: CheckpointableEngine, checkpoint: Checkpoint) -> None:
        sharding = sharding_at(engine.zero_optimization_stage())
        sharding.require_same_stage(checkpoint.state.zero_stage, checkpoint.path)
        sharding.require_resumable(
            saved_ranks=checkpoint.state.world_size, ranks=self._world.size, checkpoint=checkpoint.path
        )

    def _require_plain(self, checkpoint: Checkpoint) -> frozenset[str]:
        """Checks that DeepSpeed's files hold no more than DeepSpeed stores; each rank reads a part.

        That is: tensors and plain values. Raises: CheckpointError on all ranks otherwise.
        """
        reports = self._world.all_gather(
            find_classes(checkpoint, checkpoint.files[self._world.rank :: self._world.size])
        )
        for _, problem in reports:
            if problem is not None:
                raise _refusal_of_code(checkpoint, problem)
        return frozenset().union(*(classes for classes, _ in reports))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Reports which save failed where; torch reports a full disk as RuntimeError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise SaveError(
                f"rank {self._world.rank} on {socket.gethostname()} failed while saving a checkpoint into "
                f"{self._directory} ({free_space(self._directory)}): {error}\n"
                "Older checkpoints are untouched. Remove the cause (is the disk full?), then run the same command "
                "again: it continues from the newest."
            ) from error

    @contextmanager
    def _writing_together(self) -> Iterator[None]:
        """Does the same with all ranks: if it fails on one of them, every rank has that rank's error."""
        problem = None
        try:
            with self._writing():
                yield
        except SaveError as error:
            problem = error
        found = [one for one in self._world.all_gather(problem) if one is not None]
        if found:
            raise found[0]


@contextmanager
def _only_warning(checkpoint: Path) -> Iterator[None]:
    """Makes a failure after a checkpoint is whole a warning."""
    try:
        yield
    except OSError as error:
        log.warning("checkpoint %s is whole, but not all of %s is up to date: %s", checkpoint, checkpoint.parent, error)


def newest_whole(directory: Path, world: World) -> Checkpoint | None:
    """Returns the newest checkpoint that every rank sees complete, the same on all ranks; None if there never was one.

    Each rank checks the sizes of all files, and the checksums of a part of them. A broken checkpoint is named in a
    warning and skipped.

    Raises: CheckpointError if there are checkpoints but none is complete: starting from step 0 would hide the loss.
    """
    broken = []
    for path in world.on_main(lambda: find_candidates(directory)):
        checkpoint, problem = _verify(path, world)
        if checkpoint is not None and problem is None:
            return checkpoint
        broken.append(f"{path.name}: {problem}")
        if world.is_main:
            log.warning("checkpoint %s is broken and skipped: %s", path, problem)
    if broken:
        raise CheckpointError(
            f"{directory} holds {len(broken)} checkpoints and none of them is complete:\n  "
            + "\n  ".join(broken)
            + f"\nRestore one from a copy, or move {directory} away to start from step 0."
        )
    return None


def whole_at(directory: Path, step: int, world: World) -> Checkpoint | None:
    """Returns the checkpoint after `step` steps, checked as by `newest_whole`; None if there are no checkpoints.

    Raises: CheckpointError if it is broken, or if there are checkpoints and none of this step: those are listed.
    """
    candidates = world.on_main(lambda: find_candidates(directory))
    if not candidates:
        return None
    names = (checkpoint_name(step), hidden(checkpoint_name(step), REPLACED))
    path = next((path for path in candidates if path.name in names), None)
    if path is None:
        known = ", ".join(str(step_of(path)) for path in reversed(candidates))
        raise CheckpointError(
            f"{directory} holds no checkpoint of step {step}; there are those of {known} (training.keep_checkpoints "
            "is the number that is kept)"
        )
    checkpoint, problem = _verify(path, world)
    if problem is not None:
        raise CheckpointError(f"checkpoint {path} is broken: {problem}. Restore it from a copy, or name another step")
    return checkpoint


def _verify(path: Path, world: World) -> tuple[Checkpoint | None, str | None]:
    """Returns the checkpoint as rank 0 reads its manifest, and the problem that the first rank finds with it."""
    checkpoint, problem = world.on_main(lambda: _read_manifest(path))
    if checkpoint is None:
        return None, problem
    share = checkpoint.files[world.rank :: world.size]
    seen_here = find_wrong_size(checkpoint) or find_wrong_content(checkpoint, share)
    if seen_here is not None:
        seen_here += f" (seen by rank {world.rank} on {socket.gethostname()})"
    objections = [objection for objection in world.all_gather(seen_here) if objection is not None]
    return checkpoint, objections[0] if objections else None


def _refusal_of_code(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {checkpoint.path}: {problem}. Reading it could run any code, and no checkpoint that evenpack has "
        "saved needs it: the file was changed, or comes from elsewhere. None of it was run. Restore the checkpoint "
        "from a copy that you trust, or move it away to continue from an older one."
    )


def _read_manifest(path: Path) -> tuple[Checkpoint | None, str | None]:
    try:
        return read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)


def _looks_whole(path: Path, *, newest_step: int) -> bool:
    """Returns whether a checkpoint counts among those to keep.

    By sizes, since reading all bytes at each save is slow.
    """
    checkpoint, _ = _read_manifest(path)
    return checkpoint is not None and checkpoint.step <= newest_step and find_wrong_size(checkpoint) is None


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
