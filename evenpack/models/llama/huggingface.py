"""The names that transformers gives to the parts of a Llama.

`LlamaForCausalLM` keeps query, key and value apart, and gate and values of the feed-forward layer; ours are one matrix
each.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from evenpack.config import validate
from evenpack.errors import CheckpointError
from evenpack.models.common.section import ROTARY_BASE, RotaryScaling
from evenpack.models.common.tensors import HuggingFaceMapping, TensorName, check_config, untied
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.llama.model import Llama

_LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"

_BLOCK_PARTS = {
    "attention_norm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.expand": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.contract": ("mlp.down_proj",),
}

_CONSTANTS = (".rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry besides the weights."""

_FIXED_ARCHITECTURE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
"""Keys of config.json for which our model has only one value, which is also transformers' default."""

_REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
}


def tensor_names(model: Llama) -> list[TensorName]:
    """Returns the name of every parameter in transformers."""
    width, key_value_size = model.config.shape["hidden_size"], model.config.key_value_size
    rows = {"attention.query_key_value": (width, key_value_size, key_value_size)}
    names = [_named("token_embedding", (_EMBEDDING,)), _named("final_norm", ("model.norm.weight",))]
    if model.output_head is not None:
        names.append(_named("output_head", (_LM_HEAD,)))
    for layer in range(len(model.blocks)):
        for ours, parts in _BLOCK_PARTS.items():
            theirs = tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
            names.append(_named(f"blocks.{layer}.{ours}", theirs, rows.get(ours)))
    return names


def plain_weights(model: Llama, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trained tensors, each once.

    Raises: CheckpointError if the LM head is not the token embedding, and the model's is.
    """
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(_CONSTANTS)}
    if model.output_head is None:
        untied(found, _LM_HEAD, _EMBEDDING)
    return found


def config_values(model: Llama, end_of_text_id: int) -> dict[str, Any]:
    """Returns the content of config.json; releases before the fifth read `rope_theta`, later ones `rope_parameters`."""
    config, shape = model.config, model.config.shape
    rotary = config.rotary_scaling
    reach = 0 if rotary is None else math.ceil(rotary.factor * rotary.original_positions)
    scaling = _scaling_values(rotary)
    return _FIXED_ARCHITECTURE | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocabulary_size,
        "max_position_embeddings": max(model.max_positions, reach),
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["feed_forward_size"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["key_value_heads"],
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rotary_base} | (scaling or {"rope_type": "default"}),
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": config.dropout_of_attention,
        "initializer_range": INITIAL_DEVIATION,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "dtype": "float32",
    }


def read_config(values: Mapping[str, Any], origin: str) -> tuple[LlamaConfig, dict[str, int]]:
    """Returns the `model:` section that computes what config.json describes, and the sizes of its tables.

    Dropout is the run's choice and stays 0.

    Raises: CheckpointError if we do not compute such a model.
    """
    check_config(values, _FIXED_ARCHITECTURE, _REQUIRED, origin)
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    if values.get("head_dim") not in (None, head_dim):
        raise CheckpointError(f"{origin}: head_dim must be null or {head_dim}, found {values['head_dim']}")
    section = {
        "kind": "llama",
        "max_positions": values["max_position_embeddings"],
        "layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "heads": values["num_attention_heads"],
        "key_value_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "feed_forward_size": values["intermediate_size"],
        "norm_epsilon": values["rms_norm_eps"],
        **_rotations(values, origin),
        "tied_head": values.get("tie_word_embeddings", False),
    }
    sizes = {"vocabulary_size": values["vocab_size"], "max_positions": values["max_position_embeddings"]}
    return validate(section, LlamaConfig, origin=origin), sizes


def config_for_weights(config: LlamaConfig, names: Collection[str], origin: str) -> LlamaConfig:
    """Returns the section as it is: config.json describes the model completely."""
    return config


_SCALING_NAMES = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""The keys of `rotary_scaling`, and of rope_type `llama3` in transformers."""


def _scaling_values(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for ours, theirs in _SCALING_NAMES.items()}


def _rotations(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns the keys of the section for rotations; releases before the fifth scale them by `rope_scaling`.

    Raises: CheckpointError for angles that are scaled in another way.
    """
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rotation = dict(values.get(key) or {})
    base = float(rotation.pop("rope_theta", values.get("rope_theta", ROTARY_BASE)))
    kind = rotation.pop("rope_type", rotation.pop("type", "default"))
    expected = {"default": set(), "llama3": set(_SCALING_NAMES.values())}.get(kind)
    if expected is None or rotation.keys() != expected:
        raise CheckpointError(
            f"{origin}: {key} must be of rope_type 'default' with a rope_theta alone, or of rope_type 'llama3' with "
            f"{', '.join(_SCALING_NAMES.values())} as well, found {values[key]!r}"
        )
    if kind == "default":
        return {"rotary_base": base}
    return {"rotary_base": base, "rotary_scaling": {ours: rotation[theirs] for ours, theirs in _SCALING_NAMES.items()}}


def _named(ours: str, theirs: tuple[str, ...], rows: tuple[int, ...] | None = None) -> TensorName:
    return TensorName(ours=f"{ours}.weight", theirs=theirs, is_transposed=False, rows=rows)


LLAMA_MAPPING = HuggingFaceMapping(
    model_type="llama",
    special_token="end_of_text",
    input_names=("input_ids", "attention_mask"),
    tensor_names=tensor_names,
    plain_weights=plain_weights,
    config_values=config_values,
    read_config=read_config,
    config_for_weights=config_for_weights,
)
