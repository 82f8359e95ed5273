"""The changes that a run may and may not have when it is resumed from a checkpoint."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evenpack.config import with_defaults
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.data.prepared import PreparedData
from evenpack.differences import differences
from evenpack.engine.checkpoints.files import CHECKPOINTS, TrainState, checkpoint_by_size, find_candidates
from evenpack.engine.checkpoints.forks import parent_checkpoint, require_same_parent
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import CheckpointError

log = logging.getLogger(__name__)

_SAFE_MODEL_KEYS = ("model.dropout", "model.attention_dropout", "model.activation_checkpointing")
"""Keys that may change within a run, because they do not change the meaning of the weights."""

_OF_THE_FINGERPRINT = ("run.seed", "training.batching", "data.")
"""Prefixes of the keys of the run file that decide its fingerprint."""

_NOT_OF_THE_FINGERPRINT = (
    "data.prepared_dir",
    "data.tokens_dir",
    "data.verify_in_training",
    ".maximum_document_bytes",
)


def continued(run: ResolvedRun, state: TrainState, *, tell: Callable[..., None] = log.info) -> ResolvedRun:
    """Returns the run as it continues from a checkpoint, whatever its run file says now of how it began.

    It keeps the initial weights that it records and, while the layout is the same, the cost weights; of a run in parts
    it is the part that goes on. `tell` logs what has changed.

    Raises: CheckpointError if it cannot continue.
    """
    config = run.run_file.model_dump(mode="json")
    require_same_parent(state, run.config.run)
    require_same_past(state, run)
    require_fingerprint(state, run.fingerprint(state.step), config)
    compare_run_files(state, config, tell=tell)
    began_with = state.config["training"]["initialize_from"]
    training = run.run_file.training.model_copy(
        update={"initialize_from": None if began_with is None else Path(began_with)}
    )
    now = run.run_file.model_copy(update={"training": training})
    run = replace(run, config=now, run_file=now)
    if state.config["training"]["layout"] == config["training"]["layout"]:  # the weights of another are of other slots
        run = replace(run, shape=replace(run.shape, cost_weights=state.cost_weights), cost_model=None)
    return run.part_after(state.step)


def require_resumable(run: ResolvedRun) -> None:
    """Judges the newest checkpoint, or that of the parent, before ranks are started, which compare its content too.

    Raises: as `continued`.
    """
    candidates = map(checkpoint_by_size, find_candidates(run.config.run.output_dir / CHECKPOINTS))
    checkpoint = next((found for found in candidates if found is not None), None)
    if checkpoint is None and run.config.run.parent is not None:
        checkpoint = parent_checkpoint(run.config)
    if checkpoint is not None:
        continued(run, checkpoint.state, tell=lambda *_: None)  # rank 0 tells


def require_checkpoint(config: RunConfig) -> None:
    """Checks, without torch, that a run is prepared and has been trained.

    Raises: as `PreparedData.open`; CheckpointError if there is no checkpoint.
    """
    PreparedData.open(config.prepared_dir, config.data, verify="later")
    directory = config.run.output_dir / CHECKPOINTS
    if not find_candidates(directory):
        raise CheckpointError(f"there is no checkpoint in {directory}: run `evenpack train` with this run file first")


def require_fingerprint(state: TrainState, fingerprint: str, config: dict[str, Any]) -> None:
    """Refuses a resume over other data, or with other targets in it.

    Args:
        config: the run file as JSON values, to name the keys that have changed.

    Raises: CheckpointError.
    """
    if state.fingerprint == fingerprint:
        return
    saved, batching = state.config["run"], state.config["training"]["batching"]
    changed = {
        key: pair
        for key, pair in differences(with_defaults(state.config, RunConfig), config).items()
        if key.startswith(_OF_THE_FINGERPRINT) and not key.endswith(_NOT_OF_THE_FINGERPRINT)
    }
    finding = f"The run file has changed in\n{_lines(changed)}" if changed else "The run file has not changed in them."
    raise CheckpointError(
        f"the checkpoint at step {state.step} of run '{saved['name']}' (seed {saved['seed']}, steps of "
        f"{batching}) was trained on data with fingerprint {state.fingerprint}, this run's data, seed and "
        f"training.batching have {fingerprint}: a resume would repeat some documents and leave others out, or predict "
        f"other tokens of them. {finding}\nRestore the run file's data section, its seed, its batching and the "
        "prepared data with which the run began, or choose another run.output_dir to start again."
    )


def require_same_past(state: TrainState, run: ResolvedRun) -> None:
    """Refuses a resume if stages that have begun would draw other packs; later ones may change, begin or be left out.

    A difference of the first steps is left to `require_fingerprint` and `compare_run_files`, which name the keys.

    Raises: CheckpointError naming the first step that would differ.
    """
    found = first_difference(state.stages, run.past(state.step))
    if found is not None and found[0] > 1:
        step, lines = found
        raise CheckpointError(
            f"step {state.step} is reached, and stages may only change for the steps after it: step {step} would be "
            "the first that differs.\n" + "\n".join(lines) + "\nRestore what has been, or choose another "
            "run.output_dir to start again."
        )


def first_difference(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> tuple[int, list[str]] | None:
    """Returns the first step (from 1) that two runs of these stages form otherwise, with lines for people; or None.

    Args:
        before: from a checkpoint; none for one that was saved before there were stages, of which nothing is said.
        now: stages of `ResolvedRun.past`.
    """
    for one, other in zip_longest(before, now) if before else ():
        if one == other:
            continue
        step = min(stage["step"] for stage in (one, other) if stage is not None)
        at_step = [stage if stage is not None and stage["step"] == step else None for stage in (one, other)]
        was, is_now = ("none" if stage is None else _described(stage) for stage in at_step)
        had, has = ({} if stage is None else stage["files"] for stage in at_step)
        changed = [name for name in has if name in had and had[name] != has[name]]
        lines = [f"  the prepared files of source '{name}' are others" for name in changed]
        if was != is_now:
            lines.append(f"  stage of step {step}: {was} -> {is_now}")
        return step, lines
    return None


def _described(stage: Mapping[str, Any]) -> str:
    weights = ", ".join(f"{name} {weight}" for name, weight in stage["weights"])
    built = "".join(f", {key} {value}" for key, value in stage.get("built", {}).items())
    return f"steps of {stage['items_per_step']} by the weights {weights}{built}"


def compare_run_files(state: TrainState, config: dict[str, Any], *, tell: Callable[..., None] = log.info) -> None:
    """Logs the changes of the run file since the checkpoint once, and refuses steps of another size.

    A key that the checkpoint's run file lacks did not exist when it was saved: it counts as having had its default.

    Args:
        config: the settled run file as JSON values, as in `TrainState`.

    Raises: CheckpointError if the checkpoint is of steps of another size, other skipped ones, another optimizer or
    model structure.
    """
    changed = differences(with_defaults(state.config, RunConfig), config)
    size = f"training.{config['training']['batching']}_per_step"
    if size in changed:
        before, now = changed[size]
        raise CheckpointError(
            f"the checkpoint has done {state.step} steps of {before}, this run's {size} is {now}: documents would be "
            "repeated or left out. Restore what gives the size of a step, and let it change by a stage: "
            f"stages=[{{step: {state.step + 1}, {size}: {now}}}]; or choose another run.output_dir to start again."
        )
    _require_skipped_steps(state, config["training"])
    network = {
        key: change
        for key, change in changed.items()
        if key == "optimizer.kind" or (key.startswith("model.") and key not in _SAFE_MODEL_KEYS)
    }
    if network:
        raise CheckpointError(
            f"the checkpoint is of another network or optimizer than the run file:\n{_lines(network)}\n"
            "Restore these values, or choose another run.output_dir to start again."
        )
    if changed:
        tell(
            "the run file has changed since step %d and applies from here on (but not initialize_from, nor cost_model "
            "in the same layout):\n%s",
            state.step,
            _lines(changed),
        )


def _lines(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {key}: {before} -> {now}" for key, (before, now) in changed.items())


def _require_skipped_steps(state: TrainState, training: dict[str, Any]) -> None:
    """Compares skipped steps.

    Raises: CheckpointError if a completed step is newly skipped, or a skipped one is not any more.
    """
    before, now = (_skipped_steps(section).before(state.step) for section in (state.config["training"], training))
    if before == now:
        return
    named, taken_out = now.without(before), before.without(now)
    lines = []
    if named:
        lines.append(f"  named now, but trained on already: {named}")
    if taken_out:
        lines.append(f"  skipped already, but not named now: {taken_out}")
    raise CheckpointError(
        f"step {state.step} is reached, and training.skip_steps may only change for the steps after it:\n"
        + "\n".join(lines)
        + "\nRestore it for these steps. To have them otherwise, remove the checkpoints that are not before them, so "
        "that the run is resumed from an earlier one, or choose another run.output_dir to start again."
    )


def _skipped_steps(training: dict[str, Any]) -> SkippedSteps:
    """Returns the skipped steps of a training section as JSON values."""
    entries = training["skip_steps"]
    return SkippedSteps.named(entry if isinstance(entry, int) else (entry[0], entry[1]) for entry in entries)
