"""Weights that a run begins with: those that another run, or somebody else, has trained (`training.initialize_from`).

    OUTPUT_DIR            the newest whole checkpoint of that run
    step_000100/          that checkpoint
    FOLDER/config.json    of transformers, of a kind that a family here computes, with model.safetensors

No optimizer state, no step and no order of data comes with them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenpack.data.prepare.manifest import TOKENIZER_FOLDER
from evenpack.data.tokenizers.vocabulary import first_difference, read_vocabulary
from evenpack.engine.checkpoints.files import (
    MANIFEST,
    Checkpoint,
    find_wrong_content,
    find_wrong_size,
    read_manifest,
)
from evenpack.engine.checkpoints.store import CHECKPOINTS, newest_whole
from evenpack.engine.checkpoints.weights import (
    load_model_weights,
    require_fitting,
    require_same_network,
    saved_model_section,
)
from evenpack.engine.distributed import World
from evenpack.errors import CheckpointError
from evenpack.models.build import Model
from evenpack.models.common.section import TransformerConfig
from evenpack.models.huggingface import from_huggingface

log = logging.getLogger(__name__)

KEY = "training.initialize_from"
"""What the messages here speak of."""

_CONFIG_FILE = "config.json"
_ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))

_TOKENS = "token_embedding.weight"
_POSITIONS = "positions.table.weight"


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Weights that have been found, and not yet read."""

    path: Path
    checkpoint: Checkpoint | None
    """None: the path is a folder of transformers."""

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"{self.path} (transformers)"
        name = self.checkpoint.state.config["run"]["name"]
        return f"{self.path} after step {self.checkpoint.step} of run '{name}'"

    @property
    def tokenizer_dir(self) -> Path:
        """Where the tokenizer with which they were trained ought to be."""
        if self.checkpoint is None:
            return self.path
        config = self.checkpoint.state.config
        prepared = config["data"]["prepared_dir"] or Path(config["run"]["output_dir"]) / "data"
        return Path(prepared) / TOKENIZER_FOLDER

    def read(self) -> tuple[TransformerConfig, dict[str, Tensor]]:
        """The `model:` section that computes with them, and the weights by our parameters' names, on the CPU.

        Raises: CheckpointError if they cannot be read; ConfigError for a section of another version.
        """
        if self.checkpoint is None:
            model = from_huggingface(self.path)
            return model.config, model.state_dict()
        return saved_model_section(self.checkpoint), load_model_weights(self.checkpoint)


def initialize(model: Model, path: Path, *, tokenizer_dir: Path, world: World) -> None:
    """Fills the model of rank 0, from which all others get their weights when the engine is made; logs it once.

    Args:
        tokenizer_dir: of the data that the run trains on.

    Raises: CheckpointError on all ranks if there are no weights, or those of another model or vocabulary.
    """
    world.on_main(lambda: _initialize(model, path, tokenizer_dir))


def find_initial_weights(path: Path) -> InitialWeights:
    """Raises: CheckpointError if the path holds none, or a checkpoint that is not whole."""
    if (path / CHECKPOINTS).is_dir():
        checkpoint = newest_whole(path / CHECKPOINTS, _ALONE)
        if checkpoint is None:
            raise CheckpointError(f"{KEY}: the run in {path} has no checkpoint yet: train it first, or name another")
        return InitialWeights(path=checkpoint.path, checkpoint=checkpoint)
    if (path / MANIFEST).is_file():
        return InitialWeights(path=path, checkpoint=_whole(path))
    if (path / _CONFIG_FILE).is_file():
        return InitialWeights(path=path, checkpoint=None)
    found = "does not exist" if not path.exists() else "holds none of these" if path.is_dir() else "is no folder"
    raise CheckpointError(
        f"{KEY}: expected a run's output_dir (with {CHECKPOINTS}/), one checkpoint (step_..., with {MANIFEST}), or a "
        f"folder of transformers (with {_CONFIG_FILE} and model.safetensors); {path} {found}"
    )


def _initialize(model: Model, path: Path, tokenizer_dir: Path) -> None:
    found = find_initial_weights(path)
    config, weights = found.read()
    require_same_network(
        model.config, config, origin=f"{KEY}: {found}", remedy="make them alike, or name other weights"
    )
    require_fitting(model, weights, origin=f"{KEY}: {found}", remedy=_remedy(model, weights))
    _require_same_vocabulary(found, tokenizer_dir)
    model.load_state_dict(weights)
    log.info("initialised from %s", found)


def _whole(path: Path) -> Checkpoint:
    try:
        checkpoint = read_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}: {path} is no checkpoint that can be read: {error}") from error
    problem = find_wrong_size(checkpoint) or find_wrong_content(checkpoint, checkpoint.files)
    if problem is not None:
        raise CheckpointError(f"{KEY}: checkpoint {path} is broken: {problem}; name another one")
    return checkpoint


def _require_same_vocabulary(found: InitialWeights, tokenizer_dir: Path) -> None:
    """As many entries may still be other tokens."""
    trained_with, here = read_vocabulary(found.tokenizer_dir), read_vocabulary(tokenizer_dir)
    if trained_with is None or here is None:
        missing = found.tokenizer_dir if trained_with is None else tokenizer_dir
        log.info("%s: both vocabularies have as many entries; no tokenizer in %s to compare them by", KEY, missing)
        return
    difference = first_difference(trained_with, here)
    if difference is not None:
        raise CheckpointError(
            f"{KEY}: {found} was trained with another vocabulary, in {found.tokenizer_dir}, than this run's data, in "
            f"{tokenizer_dir}: {difference}. Prepare this run's data with that tokenizer"
        )


def _remedy(model: Model, weights: Mapping[str, Tensor]) -> str:
    """What to do about tensors that do not fit."""
    rows = {name: (len(tensor), len(weights[name])) for name, tensor in model.state_dict().items() if name in weights}
    lines = []
    needed, found = rows.get(_POSITIONS, (0, 0))
    if found < needed:
        lines.append(
            f"Positions from {found} on were never trained: train the earlier run with model.max_positions={needed}."
        )
    elif found > needed:
        lines.append(f"Set model.max_positions={found} to take the whole table of positions.")
    needed, found = rows.get(_TOKENS, (0, 0))
    if found != needed:
        lines.append(
            f"The vocabulary there has {found} entries, this run's {needed}: prepare its data with the same tokenizer."
        )
    return "\n".join(lines or ["Give this run the model section with which they were trained, or name other weights."])
