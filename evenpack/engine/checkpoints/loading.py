"""Finds the checkpoints that are complete for all ranks, and loads one of them into an engine."""

import logging
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evenpack.engine.activity import doing
from evenpack.engine.checkpoints.files import (
    Checkpoint,
    find_candidates,
    find_wrong_content,
    find_wrong_size,
    leaving_alone,
    manifest_or_problem,
    step_of,
)
from evenpack.engine.checkpoints.pickles import ALLOWED, forbidding_code
from evenpack.engine.checkpoints.universal import (
    load_universal,
    make_universal,
    parameter_shapes,
    require_only_parameters,
)
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, UnjudgedCheckpointError
from evenpack.units import counted

log = logging.getLogger(__name__)


@runtime_checkable
class LoadableEngine(Protocol):
    """The part of `deepspeed.DeepSpeedEngine` that reads its own files."""

    optimizer: Any
    """Object with torch's `param_groups`."""

    def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]: ...

    def zero_optimization_stage(self) -> int: ...


def newest_whole(directory: Path, world: World) -> Checkpoint | None:
    """Returns the newest checkpoint that every rank sees complete, the same on all ranks; None if there never was one.

    Each rank checks the sizes of all files, and the checksums of a part of them. A broken checkpoint is named in a
    warning and skipped.

    Raises: CheckpointError if there are checkpoints but none is complete: starting from step 0 would hide the loss;
    UnjudgedCheckpointError for a newer one that cannot be read now, that is of another format, or that only some of the
    machines see broken: the next save would remove it.
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
    path = next((path for path in candidates if step_of(path) == step), None)
    if path is None:
        known = ", ".join(str(step_of(path)) for path in reversed(candidates))
        raise CheckpointError(
            f"{directory} holds no checkpoint of step {step}; it has steps {known} (training.keep_checkpoints "
            "is the number that is kept)"
        )
    return whole(path, world)


def whole(path: Path, world: World) -> Checkpoint:
    """Returns the checkpoint at `path`, checked as by `newest_whole`. Raises: CheckpointError if it is broken."""
    checkpoint, problem = _verify(path, world)
    if checkpoint is None or problem is not None:
        raise CheckpointError(f"checkpoint {path} is broken: {problem}. Restore it from a copy, or name another one")
    return checkpoint


def load_checkpoint(engine: LoadableEngine, checkpoint: Checkpoint, world: World) -> None:
    """Loads a complete checkpoint into DeepSpeed's engine: weights, optimizer and DeepSpeed's own counters.

    One of another ZeRO stage, or from ZeRO 1 on of another number of ranks, is converted first (`universal.py`).
    There are no random states to restore: data order and dropout are functions of the seed and the step. The
    optimizer's settings (weight decay, betas, clipping, ...) stay as this run has them: torch and DeepSpeed would bring
    back the saved ones.

    Raises: CheckpointError if it does not fit this run's model or optimizer, if it cannot be converted, or if one of
        its files requests code to be run; none is run.
    """
    from evenpack.engine.checkpoints.checkpoint_engine import steered

    optimizer = engine.optimizer
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    clipping = getattr(optimizer, "clip_grad", None)
    with _explained(checkpoint), leaving_alone(checkpoint.path):
        if _needs_conversion(engine, checkpoint, world):
            load_universal(engine, _universal(engine, checkpoint, world), world)
        else:
            steered(engine)
            with forbidding_code(ALLOWED):
                path, _ = engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
            if path is None:
                raise CheckpointError(f"DeepSpeed found nothing to load in {checkpoint.path}")
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    if clipping is not None:
        optimizer.clip_grad = clipping


@contextmanager
def _explained(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: a file of it cannot be read without running code ({error}), and no "
            "checkpoint that evenpack has saved needs it: the file was changed, or comes from elsewhere. None of it "
            "was run. Restore the checkpoint from a copy that you trust, or move it away to continue from an older one."
        ) from error
    except FileNotFoundError as error:  # after the checks
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: {error.filename} was removed while it was read"
        ) from error
    except (AssertionError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is complete, but does not fit this run's model or optimizer: {error}\n"
            "Restore the model and optimizer sections with which it was saved (they are in its manifest.json), "
            "or choose another run.output_dir to start again."
        ) from error


def _needs_conversion(engine: LoadableEngine, checkpoint: Checkpoint, world: World) -> bool:
    stage, saved = engine.zero_optimization_stage(), checkpoint.state
    return saved.zero_stage != stage or (stage > 0 and saved.world_size != world.size)


def _universal(engine: Any, checkpoint: Checkpoint, world: World) -> Path:
    """Returns the universal form of a checkpoint, which is made here."""
    require_only_parameters(engine.module, checkpoint)
    doing.enter("converting the checkpoint", checkpoint.step)
    if world.is_main:
        log.info(
            "converting %s, saved by %s at ZeRO stage %d, for %s at ZeRO stage %d",
            checkpoint.path,
            counted(checkpoint.state.world_size, "rank"),
            checkpoint.state.zero_stage,
            counted(world.size, "rank"),
            engine.zero_optimization_stage(),
        )
    return make_universal(checkpoint, parameter_shapes(engine.module), world)


def _verify(path: Path, world: World) -> tuple[Checkpoint | None, str | None]:
    """Returns the checkpoint as rank 0 reads its manifest, and the problem that the first rank finds with it."""
    checkpoint, problem = world.on_main(lambda: manifest_or_problem(path))
    if checkpoint is None:
        with world.together():
            _, seen_here = manifest_or_problem(path)
        if None in world.all_gather(seen_here):
            raise UnjudgedCheckpointError(
                f"checkpoint {path}: {problem} on rank 0, but not on other ranks. It is left alone: look at the mount "
                "and the disk of rank 0's machine, then start the same command again"
            )
        return None, problem
    return checkpoint, _problem_of(checkpoint, world)


def _problem_of(checkpoint: Checkpoint, world: World) -> str | None:
    """Returns the problem with its files that the first rank finds, each reading a part of them; None without one.

    Raises: UnjudgedCheckpointError if a rank of another half of the world finds none there.
    """
    objections = _objections(checkpoint, world, part_of=world.rank)
    if not objections:
        return None
    shift = world.size // 2  # most often another machine: one with a bad mount, disk or memory judges for no other
    again = _objections(checkpoint, world, part_of=(world.rank + shift) % world.size)
    confirmed = [text for rank, text in objections.items() if (rank - shift) % world.size in again]
    if not confirmed:
        rank, text = next(iter(objections.items()))
        raise UnjudgedCheckpointError(
            f"checkpoint {checkpoint.path}: {text}, but rank {(rank - shift) % world.size} reads the same files as "
            "they were saved. It is left alone: look at the mount, disk and memory of that machine, then start the "
            "same command again"
        )
    return confirmed[0]


def _objections(checkpoint: Checkpoint, world: World, *, part_of: int) -> dict[int, str]:
    """Returns the problems that ranks find in the sizes, and in the checksums of the part of a rank, by rank."""
    with world.together():
        problem = find_wrong_size(checkpoint) or find_wrong_content(checkpoint, checkpoint.files[part_of :: world.size])
    seen_here = None if problem is None else f"{problem} (seen by rank {world.rank} on {socket.gethostname()})"
    return {rank: text for rank, text in enumerate(world.all_gather(seen_here)) if text is not None}
