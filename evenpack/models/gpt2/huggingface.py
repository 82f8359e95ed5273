"""The names that transformers gives to the parts of a GPT-2.

`GPT2LMHeadModel` keeps its matrices as input x output, the transpose of ours. Only learned positions have a
counterpart there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from evenpack.errors import CheckpointError, ConfigError
from evenpack.models.common.layers import GPT2_NORM_EPSILON
from evenpack.models.common.section import FEED_FORWARD_RATIO
from evenpack.models.common.tensors import (
    ConfigFile,
    HuggingFaceMapping,
    Size,
    TensorName,
    check_config,
    checked,
    renamed,
    untied,
)
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

_PREFIX = "transformer."
"""Prefix of each tensor of GPT2LMHeadModel; checkpoints of the bare GPT2Model, such as OpenAI's own, leave it out."""

_LM_HEAD = "lm_head.weight"

_BLOCK_PARTS = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}

_CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")
"""Endings of constants that old checkpoints carry besides the weights."""

_FIXED_ARCHITECTURE = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": GPT2_NORM_EPSILON,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Keys of config.json for which our model has only one value, which is also transformers' default."""


class _ConfigFile(ConfigFile):
    vocab_size: Size
    n_positions: Size
    n_embd: Size
    n_layer: Size
    n_head: Size


def tensor_names(model: Gpt2) -> list[TensorName]:
    """Returns the name of every parameter in transformers.

    Raises: ConfigError if the model has other positions than learned ones.
    """
    if model.positions is None:
        raise ConfigError(
            "transformers' GPT2LMHeadModel has learned positions only, this model was built with model.positions: "
            f"{model.config.positions}; there is no checkpoint that would compute the same. Train with "
            "model.positions: learned to exchange weights with transformers"
        )
    embeddings = {"token_embedding.weight": f"{_PREFIX}wte.weight", "positions.table.weight": f"{_PREFIX}wpe.weight"}
    names = [TensorName(ours=ours, theirs=(theirs,)) for ours, theirs in embeddings.items()]
    for layer in range(len(model.blocks)):
        for ours, theirs in _BLOCK_PARTS.items():
            names += renamed(f"blocks.{layer}.{ours}", f"{_PREFIX}h.{layer}.{theirs}")
    names += renamed("final_norm", f"{_PREFIX}ln_f")
    return [
        replace(name, is_transposed=".c_" in name.theirs[0] and name.theirs[0].endswith(".weight")) for name in names
    ]


def plain_weights(model: Gpt2, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trained tensors under their full names, each once.

    Raises: CheckpointError if the LM head is not the token embedding.
    """
    found = {_full_name(name): tensor for name, tensor in weights.items() if not name.endswith(_CAUSAL_MASKS)}
    untied(found, _LM_HEAD, f"{_PREFIX}wte.weight")
    return found


def config_values(model: Gpt2, end_of_text_id: int) -> dict[str, Any]:
    """Returns the content of config.json."""
    shape, dropout = model.config.shape, model.config.dropout
    return _FIXED_ARCHITECTURE | {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocabulary_size,
        "n_positions": model.max_positions,
        "n_embd": shape["hidden_size"],
        "n_layer": shape["layers"],
        "n_head": shape["heads"],
        "n_inner": None,
        "attn_pdrop": model.config.dropout_of_attention,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "initializer_range": INITIAL_DEVIATION,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "dtype": "float32",
    }


def read_config(values: Mapping[str, Any], origin: str) -> tuple[Gpt2Config, dict[str, int]]:
    """Returns the `model:` section that computes what config.json describes, and the sizes of its tables.

    Dropout is the run's choice and stays 0.

    Raises: CheckpointError if we do not compute such a model.
    """
    found = check_config(values, _FIXED_ARCHITECTURE, _ConfigFile, origin)
    inner = FEED_FORWARD_RATIO * found.n_embd
    if values.get("n_inner") not in (None, inner):
        raise CheckpointError(f"{origin}: n_inner must be null or {inner}, found {values['n_inner']}")
    section = {
        "kind": "gpt2",
        "positions": "learned",
        "max_positions": found.n_positions,
        "layers": found.n_layer,
        "hidden_size": found.n_embd,
        "heads": found.n_head,
    }
    sizes = {"vocabulary_size": found.vocab_size, "max_positions": found.n_positions}
    return checked(section, Gpt2Config, origin), sizes


def _full_name(name: str) -> str:
    return name if name == _LM_HEAD or name.startswith(_PREFIX) else _PREFIX + name


GPT2_MAPPING = HuggingFaceMapping(
    model_type="gpt2",
    special_token="end_of_text",
    input_names=("input_ids", "attention_mask"),
    tensor_names=tensor_names,
    plain_weights=plain_weights,
    config_values=config_values,
    read_config=read_config,
)
