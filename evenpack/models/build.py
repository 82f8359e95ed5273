"""Builds the model that a `model:` section describes."""

from typing import Any

from evenpack.errors import ConfigError
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import PackedTransformer
from evenpack.models.families import family_of

Model = PackedTransformer[Any]
"""The model of any family."""

Encoder = PackedEncoder[Any]
"""The model of any family that can be fine-tuned."""


def new_model(
    config: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    attention_backend: str = "auto",
    seed: int = 0,
) -> Model:
    """Returns the model on torch's default device; the arguments are as in `PackedTransformer`.

    Raises: ConfigError if the family's model is not one.
    """
    family = family_of(config)
    model_class = family.load_model()
    if not issubclass(model_class, PackedTransformer):
        raise ConfigError(f"model family '{family.name}': {model_class.__name__} must be a PackedTransformer")
    return model_class(
        config,
        vocabulary_size=vocabulary_size,
        max_positions=max_positions,
        attention_backend=attention_backend,
        seed=seed,
    )
