"""From a `model:` section to the model that it describes."""

from functools import partial

from evenpack.models.bert import Bert
from evenpack.models.gpt2 import Gpt2
from evenpack.models.model_config import BertConfig, ModelConfig

Model = Gpt2 | Bert


def new_model(
    config: ModelConfig, *, vocabulary_size: int, max_positions: int, attention_backend: str = "auto", seed: int = 0
) -> Model:
    """The model on torch's default device; the arguments are those of `PackedTransformer`."""
    build = partial(Bert, config) if isinstance(config, BertConfig) else partial(Gpt2, config)
    return build(
        vocabulary_size=vocabulary_size, max_positions=max_positions, attention_backend=attention_backend, seed=seed
    )
