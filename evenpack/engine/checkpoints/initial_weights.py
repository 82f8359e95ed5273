"""Initial weights that another run or another code has trained (`training.initialize_from`).

    OUTPUT_DIR            the newest complete checkpoint of that run
    step_000100/          that checkpoint
    FOLDER/config.json    of transformers, of a kind that a family here computes, with model.safetensors
    PREFIX.index          of TensorFlow, of a BERT, with PREFIX.data-...

Optimizer state, step and order of data are not taken.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from evenpack.data.tokenizers.loading import first_difference, other_tokens, read_vocabulary
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.checkpoints.weight_sources import WeightSource, find_weights
from evenpack.engine.checkpoints.weights import Shapes, require_fitting, require_same_network, shapes_of
from evenpack.engine.optimizers.build import whole_shape
from evenpack.engine.sharding import Sharding
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.models.build import Model
from evenpack.models.common.tensors import NamedWeights

log = logging.getLogger(__name__)

KEY = "training.initialize_from"
"""The key that the messages here name."""

TOKENS = "token_embedding.weight"
POSITIONS = "positions.table.weight"
"""Names of the tables of a model."""

_REMEDY = (
    "Give this run the model section (model.max_positions too) and the tokenizer with which they were trained, or name "
    "other weights."
)


def initialize(model: Model, path: Path, *, tokenizer_dir: Path, world: World, sharding: Sharding) -> None:
    """Fills the model with weights that rank 0 reads; all have them when the engine is made. Logs it once.

    Args:
        tokenizer_dir: tokenizer of the training data.

    Raises: CheckpointError on all ranks if there are no weights, or weights of another model or vocabulary.
    """
    read: list[NamedWeights] = []
    world.on_main(lambda: read.append(_read(model, path, tokenizer_dir)))
    sharding.fill(model, read[0] if read else None, world)


def _read(model: Model, path: Path, tokenizer_dir: Path) -> NamedWeights:
    """Returns weights that fit the model."""
    with naming_key_in_errors():
        found = find_weights(path)
        weights = found.read(model)
    origin = f"{KEY}: {found}"
    remedy = "make them equal, or name other weights"
    require_same_network(model.config, weights.config, origin=origin, remedy=remedy)
    require_fitting(_shapes_of_parts(model, weights), shapes_of(weights.tensors), origin=origin, remedy=_REMEDY)
    require_same_vocabulary(
        found,
        tokenizer_dir,
        of=f"this run's data, in {tokenizer_dir}",
        remedy="Prepare this run's data with that tokenizer",
    )
    log.info("%s", "; ".join([f"initialised from {found}", *weights.notes]))
    return weights


@contextmanager
def naming_key_in_errors() -> Iterator[None]:
    """Adds the name of the key that holds the path to errors in the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}: {error}") from error


def _shapes_of_parts(model: Model, weights: NamedWeights) -> Shapes:
    """Returns the shapes of the model's parameters under the names of the checkpoint."""
    parameters = {name: torch.empty(whole_shape(one), device="meta") for name, one in model.named_parameters()}
    return {
        theirs: tuple(part.shape)
        for name in weights.names
        for theirs, part in zip(name.theirs, name.parts_of(parameters[name.ours]), strict=True)
    }


def require_same_vocabulary(found: WeightSource, here: Path | Tokenizer, *, of: str, remedy: str) -> None:
    """Compares the vocabularies, because equal sizes may still have other tokens; warns of another use of them.

    Args:
        here: the tokenizer, or its folder.
        of: what has it, for messages.

    Raises: CheckpointError, which `remedy` ends.
    """
    folder = found.tokenizer_dir
    trained_with = read_vocabulary(folder)
    ours = here.vocabulary if isinstance(here, Tokenizer) else read_vocabulary(here)
    if trained_with is None or ours is None:
        missing = folder if trained_with is None else here
        log.info("%s: both vocabularies have as many entries; no tokenizer in %s for a comparison", KEY, missing)
        return
    difference = first_difference(trained_with, ours)
    if difference is not None:
        raise CheckpointError(
            f"{KEY}: {found} was trained with another vocabulary, in {folder}, than {of}: {difference}. {remedy}"
        )
    if (tokens := other_tokens(folder, here)) is not None:
        log.warning(
            "%s: %s was trained with another tokenizer of the same vocabulary, in %s, than %s: %s. %s, unless the "
            "weights are to learn other tokens",
            KEY,
            found,
            folder,
            of,
            tokens,
            remedy,
        )
