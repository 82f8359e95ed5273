"""The names that transformers gives to the parts of a Llama.

`LlamaForCausalLM` keeps query, key and value apart, and gate and values of the feed-forward layer; ours are one matrix
each.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool
from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.models.common.section import ROTARY_BASE, RotaryScaling
from evenpack.models.common.tensors import (
    HuggingFaceMapping,
    PlainRopeParameters,
    Positive,
    RopeParameters,
    Size,
    TensorName,
    UsualConfigFile,
    check_config,
    checked,
    untied,
    usual_values,
)
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


class _ScaledRopeParameters(RopeParameters):
    rope_type: Literal["llama3"]
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size


def _with_type(rotation: Any) -> Any:
    """Adds the `rope_type` that transformers assumes; in older files it is called `type`."""
    if not isinstance(rotation, dict):
        return rotation
    rest = {key: value for key, value in rotation.items() if key != "type"}
    return {"rope_type": rotation.get("type", "default")} | rest if rotation else None


_AnyRopeParameters = Annotated[
    Annotated[PlainRopeParameters | _ScaledRopeParameters, Field(discriminator="rope_type")] | None,
    BeforeValidator(_with_type),
]


class _ConfigFile(UsualConfigFile):
    num_key_value_heads: Size | None = None
    rms_norm_eps: Positive
    tie_word_embeddings: StrictBool = False
    rope_theta: Positive = ROTARY_BASE
    rope_scaling: _AnyRopeParameters = None
    rope_parameters: _AnyRopeParameters = None


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
    positions = model.max_positions
    if rotary is not None and positions <= rotary.original_positions:  # transformers warns of fewer than scaling is for
        positions = math.ceil(rotary.factor * rotary.original_positions)
    scaling = _scaling_values(rotary)
    return _FIXED_ARCHITECTURE | {
        "architectures": ["LlamaForCausalLM"],
        **usual_values(model),
        "max_position_embeddings": positions,
        "intermediate_size": shape["feed_forward_size"],
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
    found = check_config(values, _FIXED_ARCHITECTURE, _ConfigFile, origin)
    head_dim = found.hidden_size // found.num_attention_heads
    if values.get("head_dim") not in (None, head_dim):
        raise CheckpointError(f"{origin}: head_dim must be null or {head_dim}, found {values['head_dim']}")
    section = {
        "kind": "llama",
        **found.section,
        "key_value_heads": found.num_key_value_heads or found.num_attention_heads,
        "feed_forward_size": found.intermediate_size,
        "norm_epsilon": found.rms_norm_eps,
        **_rotations(found, values, origin),
        "tied_head": found.tie_word_embeddings,
    }
    return checked(section, LlamaConfig, origin), found.sizes


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


def _rotations(found: _ConfigFile, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns the keys of the section for rotations.

    Raises: CheckpointError if the keys of the file disagree: releases of transformers differ in which they read.
    """
    rotations = [one for one in (found.rope_scaling, found.rope_parameters) if one] or [PlainRopeParameters()]
    first, *others = [_section_keys(one, found.rope_theta) for one in rotations]
    if "rope_theta" in found.model_fields_set:
        others.append(first | {"rotary_base": found.rope_theta})
    if any(other != first for other in others):
        keys = [key for key in ("rope_theta", "rope_scaling", "rope_parameters") if values.get(key)]
        raise CheckpointError(
            f"{origin}: {' and '.join(keys)} must describe the same rotations, as releases of transformers differ in "
            f"which they read; found {', '.join(f'{key} {values[key]!r}' for key in keys)}: keep what the model was "
            "trained with"
        )
    return first


def _section_keys(rotation: PlainRopeParameters | _ScaledRopeParameters, otherwise: float) -> dict[str, Any]:
    base = {"rotary_base": rotation.base(otherwise)}
    if isinstance(rotation, PlainRopeParameters):
        return base
    return base | {"rotary_scaling": {ours: getattr(rotation, theirs) for ours, theirs in _SCALING_NAMES.items()}}


def _named(ours: str, theirs: tuple[str, ...], rows: tuple[int, ...] | None = None) -> TensorName:
    return TensorName(ours=f"{ours}.weight", theirs=theirs, rows=rows)


LLAMA_MAPPING = HuggingFaceMapping(
    model_type="llama",
    special_token="end_of_text",
    input_names=("input_ids", "attention_mask"),
    tensor_names=tensor_names,
    plain_weights=plain_weights,
    config_values=config_values,
    read_config=read_config,
)
