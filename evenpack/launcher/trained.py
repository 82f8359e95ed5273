"""A checkpoint's weights in a model, in one process: `load_trained_model`, for `evaluate_run` and `export_run`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from evenpack.data.prepare.manifest import Manifest
from evenpack.engine.build import build_model
from evenpack.engine.checkpoints.files import CHECKPOINTS, Checkpoint
from evenpack.engine.checkpoints.keeping import best_step
from evenpack.engine.checkpoints.loading import newest_whole, whole_at
from evenpack.engine.checkpoints.weights import (
    load_model_weights,
    require_fitting,
    require_same_network,
    saved_model_section,
)
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, DataError
from evenpack.models.build import Model
from evenpack.models.huggingface import mapping_of

StepOrBest = int | Literal["best"] | None
"""The checkpoint after a step, that of the lowest validation loss, or the newest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint of its run."""

    model: Model
    checkpoint: Checkpoint
    run: ResolvedRun
    world: World
    """The world of this single process."""

    @property
    def special_token_id(self) -> int:
        """Returns the special token's id for transformers' configuration of such a model.

        Raises: ConfigError if transformers has no such model; DataError if its configuration names the padding token,
        and the vocabulary has none.
        """
        is_padding = mapping_of(self.model.config).special_token == "padding"
        return self.run.prepared.padding_id if is_padding else self.run.prepared.end_of_text_id


def load_trained_model(config: RunConfig, device: torch.device, *, step: StepOrBest = None) -> TrainedModel:
    """Opens the run's data and loads its newest complete checkpoint, or that after `step` steps, or the best.

    The data may differ from the training data, for example in the recipe, if the tokenizer is the same.

    Raises: NotPreparedError; DataError, also for data of another tokenizer; CheckpointError if there is no checkpoint,
    or of another model.
    """
    run = open_run(_without_cost_model(config))
    world = World(rank=0, size=1, local_rank=0, device=device)
    directory = config.run.output_dir / CHECKPOINTS
    if step == "best":
        step = best_step(directory)
    checkpoint = newest_whole(directory, world) if step is None else whole_at(directory, step, world)
    if checkpoint is None:
        raise CheckpointError(f"there is no checkpoint in {directory}: run `evenpack train` with this run file first")
    if checkpoint.state.fingerprint != run.fingerprint(checkpoint.step):
        _compare_data(checkpoint, run)
    model = build_model(run, device)
    weights = load_model_weights(checkpoint)
    remedy = "The run file with which it was trained is in its manifest.json"
    require_fitting(model.state_dict(), weights, origin=str(checkpoint.path), remedy=remedy)
    require_same_network(config.model, saved_model_section(checkpoint), origin=str(checkpoint.path), remedy=remedy)
    model.load_state_dict(weights)
    log.info("loaded %s", checkpoint.path)
    return TrainedModel(model=model.eval(), checkpoint=checkpoint, run=run, world=world)


def _compare_data(checkpoint: Checkpoint, run: ResolvedRun) -> None:
    """Warns if held-out documents may be among those on which the checkpoint was trained.

    Raises: DataError naming the difference between the two tokenizers.
    """
    place = checkpoint.state.config["data"]["prepared_dir"]
    trained_on = run.config.run.output_dir / "data" if place is None else Path(place)
    here = run.prepared.manifest
    try:
        there = Manifest.read(trained_on)
    except DataError as error:
        log.warning(
            "%s was trained on other data than %s, with whose tokenizer and held-out documents these cannot be "
            "compared: %s",
            checkpoint.path,
            run.prepared.directory,
            error,
        )
        return
    for key in ("vocabulary_size", "end_of_text_id", "checksum"):
        before, now = getattr(there.tokenizer, key), getattr(here.tokenizer, key)
        if before != now:
            raise DataError(
                f"{checkpoint.path} was trained with another tokenizer than that of {run.prepared.directory}: "
                f"its {key} is {before}, here it is {now}. Evaluate data that was prepared as {trained_on} was"
            )
    if any(there.data[key] != here.data[key] for key in ("sources", "validation_fraction")):
        log.warning(
            "%s was trained on other data: it may have seen some of the documents that are evaluated here",
            checkpoint.path,
        )


def _without_cost_model(config: RunConfig) -> RunConfig:
    """Removes the cost model, because nothing is balanced here and its file may be missing."""
    training = config.training.model_copy(update={"cost_model": None})
    return config.model_copy(update={"training": training})
