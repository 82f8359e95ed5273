"""What may change in a run between a checkpoint and going on from it, and what may not."""

import logging
from pathlib import Path
from typing import Any

from evenpack.engine.checkpoint_files import TrainState, find_changed_keys
from evenpack.engine.run_config import RunConfig
from evenpack.errors import CheckpointError

log = logging.getLogger(__name__)

_SAFE_MODEL_KEYS = ("model.dropout", "model.activation_checkpointing")
"""What may change within a run: they leave the weights' meaning as it is."""

_PACKING_ADJUSTMENT = "training.packing_adjustment"
"""Told by the numbers that it has made, which are compared."""

_INITIAL_WEIGHTS = "training.initialize_from"
"""Of no use to a run that has a checkpoint."""


def require_fingerprint(state: TrainState, fingerprint: str) -> None:
    """Refuses to go on over other data.

    Raises: CheckpointError.
    """
    if state.fingerprint != fingerprint:
        saved = state.config.get("run", {})
        raise CheckpointError(
            f"the checkpoint at step {state.step} of run '{saved.get('name')}' (seed {saved.get('seed')}) was trained "
            f"on data with fingerprint {state.fingerprint}, this run's data and seed have {fingerprint}: going on "
            "would repeat some documents and leave others out. Restore the run file's data section, its seed and the "
            "prepared data with which the run began, or choose another run.output_dir to start anew."
        )


def compare_run_files(state: TrainState, config: dict[str, Any]) -> None:
    """Tells once what has changed in the run file since the checkpoint, and refuses steps of another size.

    Args:
        config: the resolved and adjusted run file as JSON values, as in `TrainState`.

    Raises: CheckpointError if the checkpoint is of another number of packs a step, optimizer or model structure.
    """
    changed = find_changed_keys(state.config, config)
    changed.pop(_PACKING_ADJUSTMENT, None)
    _tell_of_initial_weights(state, *changed.pop(_INITIAL_WEIGHTS, (None, None)))
    if "training.packs_per_step" in changed:
        before, now = changed["training.packs_per_step"]
        remedy = f"Set training.packs_per_step={before}"
        if config["training"].get("packing_adjustment") == "fewer_accumulations":
            remedy = "Restore the training.packs_per_step and packing_adjustment with which the run began"
        raise CheckpointError(
            f"the checkpoint has done {state.step} steps of {before} packs, this run's training.packs_per_step is "
            f"{now}: step {state.step + 1} would not begin at the pack that comes next, and documents would be "
            f"repeated or left out. {remedy}, or choose another run.output_dir to start anew."
        )
    network = {
        key: change
        for key, change in changed.items()
        if key == "optimizer.kind" or (key.startswith("model.") and key not in _SAFE_MODEL_KEYS)
    }
    if network:
        lines = [f"  {key}: {before} -> {now}" for key, (before, now) in network.items()]
        raise CheckpointError(
            "the checkpoint is of another network or optimizer than the run file asks for:\n"
            + "\n".join(lines)
            + "\nRestore these values, or choose another run.output_dir to start anew."
        )
    if changed:
        lines = [f"  {key}: {before} -> {now}" for key, (before, now) in changed.items()]
        log.info("the run file has changed since step %d and holds from here on:\n%s", state.step, "\n".join(lines))


def keep_initial_weights(config: RunConfig, state: TrainState) -> RunConfig:
    """The run with the `training.initialize_from` that it began with, which is what its checkpoints are to tell."""
    began_with = state.config["training"].get("initialize_from")
    path = None if began_with is None else Path(began_with)
    return config.model_copy(update={"training": config.training.model_copy(update={"initialize_from": path})})


def _tell_of_initial_weights(state: TrainState, began_with: str | None, asked_for: str | None) -> None:
    """Says that weights which the run file now asks for are not taken."""
    if asked_for is not None:
        log.info(
            "%s is now %s and changes nothing: the run goes on with its own weights after step %d and began with %s. "
            "Choose another run.output_dir to begin with others.",
            _INITIAL_WEIGHTS,
            asked_for,
            state.step,
            began_with or "those of its seed",
        )
