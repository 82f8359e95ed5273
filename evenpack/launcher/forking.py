"""A run file that begins with a step of another run, and the checkpoint for it."""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpack.config import overridden, validate
from evenpack.engine.checkpoints.continuation import continued
from evenpack.engine.checkpoints.files import Checkpoint, find_wrong_content
from evenpack.engine.checkpoints.forks import checkpoint_of, parent_checkpoint, take_over
from evenpack.engine.config import ParentSection, RunConfig
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.resolving.requirements import require_trainable
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import CheckpointError, ConfigError
from evenpack.launcher.new_run import write_commented

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ForkedRun:
    """A run that has been forked, and that `evenpack train` continues."""

    run_file: Path
    output_dir: Path
    checkpoint: Path
    """Its own first checkpoint, which is the parent's."""


def fork_run(run: Path, step: int, run_file: Path, overrides: Sequence[str]) -> ForkedRun:
    """Writes the run file of a run that begins with a step of another, and then links the checkpoint into its folder.

    A kill in between loses nothing: `evenpack train` would link it.

    Args:
        run: output folder of the other run.

    Raises: ConfigError, DataError or CheckpointError, before anything is written, if there is no complete checkpoint of
    the step, or if the overrides change what a resume may not change.
    """
    if run_file.exists():
        raise ConfigError(f"{run_file} exists already: choose another name, or remove it")
    origin = str(run_file)
    parent = validate({"run": run, "step": step}, ParentSection, origin=origin)
    values = overridden(_values(checkpoint_of(parent), parent, run_file.stem), RunConfig, overrides, origin=origin)
    config = validate(values, RunConfig, origin=origin)
    _require_effect(overrides, config, step)
    output_dir = config.run.output_dir
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ConfigError(f"run.output_dir {output_dir} is not empty: name another, as run.output_dir=FOLDER")
    resolved = open_run(config, verify="later")  # by the ranks
    require_trainable(resolved)
    checkpoint = parent_checkpoint(resolved.config)
    continued(resolved, checkpoint.state)
    problem = find_wrong_content(checkpoint, checkpoint.files)
    if problem is not None:
        raise CheckpointError(f"checkpoint {checkpoint.path} is broken: {problem}. Restore it, or name another step")
    comment = (
        f"Forked from step {step} of {run}: begins with its weights, optimizer and order, and goes on from there. "
        "`evenpack config explain KEY` explains a key, also one that is not in this file and has its default."
    )
    write_commented(run_file, values, comment)
    return ForkedRun(run_file=run_file, output_dir=output_dir, checkpoint=take_over(checkpoint, output_dir).path)


def next_command(forked: ForkedRun) -> str:
    """Returns the command that trains it."""
    return f"evenpack train {shlex.quote(str(forked.run_file))}"


def _require_effect(overrides: Sequence[str], config: RunConfig, step: int) -> None:
    """Refuses an override of a key to which a stage gives another value from the fork's first step on, or before it."""
    given = {override.partition("=")[0] for override in overrides}
    for stage in (stage for stage in config.stages if stage.step <= step + 1):
        for key in sorted(given & stage.changes.keys()):
            raise ConfigError(
                f"{key} would have no effect: the stage of step {stage.step} gives another value, and the fork begins "
                f"with step {step + 1}. Give the value in a stage of step {step + 1}, after the others in stages=[...]"
            )


def _values(checkpoint: Checkpoint, parent: ParentSection, name: str) -> dict[str, Any]:
    """Returns the sections of the run file: the parent's at that step, without what was for the parent alone."""
    config, record = checkpoint.state.config, read_run_record(parent.run)
    if record is not None and (record.config["run"].get("parent") or {}).get("step") == parent.step:
        config = record.config  # its own: the first checkpoint of a fork has the run file of its trunk
    saved = validate(config, RunConfig, origin=str(checkpoint.path))
    values = stated(saved.model_copy(update={"run": saved.run.model_copy(update={"parent": parent})}))
    values["run"] |= {"name": name, "output_dir": os.path.normpath(parent.run / ".." / name)}  # also beside "."
    beside = parent.run / saved.prepared_dir.name  # also where the parent was moved; a fork's data is its parent's
    prepared = beside if saved.data.prepared_dir is None and beside.exists() else saved.prepared_dir
    values["data"] |= {"prepared_dir": str(prepared)}
    for key in ("initialize_from", "keep_checkpoint_steps", "stop_after_steps"):
        values["training"].pop(key, None)
    return values


def stated(config: RunConfig) -> dict[str, Any]:
    """Returns the sections of a run file that gives the same run, as short as it can be."""
    return _stated(config.model_dump(mode="json"), config.model_dump(mode="json", exclude_defaults=True))


def _stated(values: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are not their defaults, with the `kind` of each section, by which it is read."""
    return {
        key: _stated(value, changed[key]) if isinstance(value, dict) and key in changed else value
        for key, value in values.items()
        if key in changed or key == "kind"
    }
