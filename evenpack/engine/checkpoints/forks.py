"""A run that begins with a step of another: the parent's checkpoint becomes its first one (`run.parent`).

It imports no torch: `evenpack fork` and `evenpack train` check it before ranks are started.
"""

import logging
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from evenpack.engine.checkpoints.files import (
    CHECKPOINTS,
    LATEST,
    Checkpoint,
    TrainState,
    checkpoint_name,
    whole_by_size,
    write_manifest,
)
from evenpack.engine.config import ParentSection, RunConfig, RunSection
from evenpack.engine.ownership import require_owned
from evenpack.errors import CheckpointError, ConfigError
from evenpack.files import atomic_directory, explained, write_text

log = logging.getLogger(__name__)


def parent_checkpoint(config: RunConfig) -> Checkpoint:
    """Returns the checkpoint with which a settled run begins that has a parent; as by `checkpoint_of`.

    Raises: CheckpointError; ConfigError for a run that cannot begin there.
    """
    parent = config.run.parent
    assert parent is not None, "only a run with a parent begins with a checkpoint of another"
    if config.training.stop_step <= parent.step:
        raise ConfigError(
            f"run.parent: this run would begin after step {parent.step} and end with step {config.training.stop_step}: "
            "raise training.steps (or what gives them, or training.stop_after_steps)"
        )
    if config.mlperf is not None:
        raise ConfigError(
            "run.parent: the log of the section mlperf: begins with a run's first step, and this run begins after step "
            f"{parent.step} of another: set mlperf=null"
        )
    return checkpoint_of(parent)


def checkpoint_of(parent: ParentSection) -> Checkpoint:
    """Returns the parent's complete checkpoint, with a state that names the parent as the run's own later ones will.

    Sizes of files are compared, and not their content.

    Raises: CheckpointError that names the steps of which there are some; UnjudgedCheckpointError.
    """
    whole = {checkpoint.step: checkpoint for checkpoint in whole_by_size(parent.run / CHECKPOINTS)}
    found = whole.get(parent.step)
    if found is None:
        lack = f"{parent.run / CHECKPOINTS} has none" if parent.run.is_dir() else f"{parent.run} does not exist"
        there = f"{lack}: name the output folder of a run, or put back what was moved"
        if whole:
            there = f"it has those of steps {', '.join(map(str, sorted(whole)))}: name one of them"
        raise CheckpointError(
            f"run.parent: there is no complete checkpoint of step {parent.step} in {parent.run}; {there}. "
            "training.keep_checkpoint_steps of a run names steps whose checkpoints stay"
        )
    run = found.state.config["run"] | {"parent": parent.model_dump(mode="json")}
    return replace(found, state=replace(found.state, config=found.state.config | {"run": run}))


def take_over(checkpoint: Checkpoint, output_dir: Path) -> Checkpoint:
    """Makes the parent's checkpoint the first of the run in `output_dir`; by one process. A kill leaves it, or nothing.

    Its files are hard-linked, so that they take no room and stay whatever becomes of the parent, or are copied where
    the file system has no such links.

    Raises: CheckpointError if that is not possible.
    """
    path = output_dir / CHECKPOINTS / checkpoint_name(checkpoint.step)
    then = "start the run (`evenpack train`), which tries it again"
    with explained(path, CheckpointError, action="made", then=then):
        with atomic_directory(path) as folder:
            for record in checkpoint.files:
                target = folder / record.name
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(checkpoint.path / record.name, target)
            write_manifest(folder, checkpoint.state, checkpoint.files)
            require_owned(output_dir)
        write_text(path.parent / LATEST, f"{path.name}\n", check=partial(require_owned, output_dir))
    log.info("the run begins with %s: its files are hard-linked, or copied, to %s", checkpoint.path, path)
    return replace(checkpoint, path=path)


def require_same_parent(state: TrainState, run: RunSection) -> None:
    """Refuses a resume of a run that had another parent, or none. Raises: CheckpointError."""
    before = state.config["run"].get("parent")
    now = None if run.parent is None else run.parent.model_dump(mode="json")
    if before != now:
        raise CheckpointError(
            f"run.parent is {_shown(now)}, and of the run with the checkpoint at step {state.step} it is "
            f"{_shown(before)}: a run keeps the parent with which it began. Restore it (it is not read any more once a "
            "run has a checkpoint), or choose another run.output_dir to begin with another parent."
        )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        try:
            os.link(source.resolve(), target)  # a link to a symbolic link would not hold the content
        except OSError:
            shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{source} was removed while it was taken over: a run removes its older checkpoints, unless "
            "training.keep_checkpoint_steps names them. Name another step as run.parent"
        ) from error


def _shown(parent: object) -> str:
    return f"step {parent['step']} of {parent['run']}" if isinstance(parent, dict) else "null"
