"""Pretrained weights in an encoder, and the matching tokenizer."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evenpack.data.tokenizers.loading import first_difference, load_tokenizer, read_vocabulary, tokenizer_of_weights
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.checkpoints.initial_weights import KEY, naming_key_in_errors
from evenpack.engine.checkpoints.weight_origins import DescribedWeights, find_weights
from evenpack.engine.checkpoints.weights import require_fitting
from evenpack.errors import CheckpointError, ConfigError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.models.build import Encoder, new_model
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import family_of

log = logging.getLogger(__name__)

_TOKENS = "token_embedding.weight"
_POSITIONS = "positions.table.weight"


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights that have been read, with which each seed begins."""

    origin: str
    """Origin of the weights, for people and for `settings.json`."""
    section: TransformerConfig
    """The `model:` section, with the dropout of this run."""
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    attention_backend: str

    def new_encoder(self) -> Encoder:
        """Returns a new copy on the CPU."""
        rows = {name: len(self.weights[name]) for name in (_TOKENS, _POSITIONS)}
        with torch.device("meta"):
            model = new_model(
                self.section,
                vocabulary_size=rows[_TOKENS],
                max_positions=rows[_POSITIONS],
                attention_backend=self.attention_backend,
            )
        assert isinstance(model, PackedEncoder), "checked when the weights were read"
        require_fitting(model.state_dict(), self.weights, origin=f"{KEY}: {self.origin}", remedy="Name other weights.")
        model.to_empty(device="cpu")
        model.load_state_dict(self.weights)
        return model


def read_pretrained(config: FinetuneConfig) -> Pretrained:
    """Reads the weights that `training.initialize_from` names.

    Raises: ConfigError if it names nothing, or a model that is not an encoder; CheckpointError if there are no readable
    weights, or weights of too few positions or of another vocabulary; DataError without a tokenizer.
    """
    path = config.training.initialize_from
    if path is None:
        raise ConfigError(
            f"fine-tuning starts from pretrained weights: give {KEY}=PATH, a run's output_dir, one checkpoint or a "
            "folder of transformers"
        )
    with naming_key_in_errors():
        found = find_weights(path)
        if not isinstance(found, DescribedWeights):
            raise CheckpointError(
                f"{found} does not describe its model: begin a run with it (`evenpack train`), or have it "
                "converted for transformers, and name that run or folder"
            )
        section, weights = found.read_described()
    family = family_of(section)
    if not issubclass(family.load_model(), PackedEncoder):
        raise ConfigError(
            f"{KEY}: {found} is of family '{family.name}', whose tokens see only earlier tokens; fine-tuning "
            "is for encoders"
        )
    tokenizer = _tokenizer(config, found)
    _require_sizes(config, found, weights, tokenizer)
    _require_same_words(found, tokenizer)
    return Pretrained(
        origin=str(found),
        section=section.model_copy(update={"dropout": config.training.dropout, "attention_dropout": None}),
        weights=weights,
        tokenizer=tokenizer,
        attention_backend=config.attention.backend,
    )


def _tokenizer(config: FinetuneConfig, found: DescribedWeights) -> Tokenizer:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    log.info("tokenizer of the weights, from %s", found.tokenizer_dir)
    return tokenizer_of_weights(found.tokenizer_dir)


def _require_sizes(
    config: FinetuneConfig, found: DescribedWeights, weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    positions, vocabulary = len(weights[_POSITIONS]), len(weights[_TOKENS])
    if positions < config.data.max_sequence_length:
        raise CheckpointError(
            f"{KEY}: {found} has {positions} positions, and data.max_sequence_length is "
            f"{config.data.max_sequence_length}: lower that, or name weights that were trained with more"
        )
    if tokenizer.vocabulary_size != vocabulary:
        raise CheckpointError(
            f"{KEY}: {found} has a vocabulary of {vocabulary} entries, the tokenizer one of "
            f"{tokenizer.vocabulary_size}: give the tokenizer of these weights as data.tokenizer"
        )


def _require_same_words(found: DescribedWeights, tokenizer: Tokenizer) -> None:
    """Compares the vocabularies, because equal sizes may still have other tokens."""
    trained_with = read_vocabulary(found.tokenizer_dir)
    difference = None if trained_with is None else first_difference(trained_with, tokenizer.vocabulary)
    if difference is not None:
        raise CheckpointError(
            f"{KEY}: {found} was trained with another vocabulary, in {found.tokenizer_dir}, than data.tokenizer has: "
            f"{difference}. Leave data.tokenizer out"
        )
