"""The names that transformers gives to the parts of a ModernBERT.

Each matrix of `ModernBertForMaskedLM` is one of ours; its decoder's is the token embedding.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from evenpack.config import Section
from evenpack.errors import CheckpointError
from evenpack.models.common.section import ROTARY_BASE
from evenpack.models.common.tensors import (
    HuggingFaceMapping,
    PlainRopeParameters,
    Positive,
    Size,
    TaskModel,
    TensorName,
    UsualConfigFile,
    check_config,
    checked,
    untied,
    usual_values,
)
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.modernbert.config import ModernBertConfig
from evenpack.models.modernbert.model import ModernBert

_EMBEDDING = "model.embeddings.tok_embeddings.weight"
_DECODER = "decoder.weight"
_HEAD = "head.dense.weight"

_SINGLE_TENSORS = {
    "token_embedding.weight": _EMBEDDING,
    "embedding_norm.weight": "model.embeddings.norm.weight",
    "final_norm.weight": "model.final_norm.weight",
    "masked_token_head.dense.weight": _HEAD,
    "masked_token_head.norm.weight": "head.norm.weight",
    "masked_token_head.decoder_bias": "decoder.bias",
}

_BLOCK_PARTS = {
    "attention_norm": "attn_norm",
    "attention.query_key_value": "attn.Wqkv",
    "attention.output": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.expand": "mlp.Wi",
    "feed_forward.contract": "mlp.Wo",
}

_TASK_HEAD = {"dense": "head.dense", "norm": "head.norm"}
_TASK_MODELS = {
    reads: TaskModel(
        architecture=architecture,
        encoder=("model.",),
        head={f"{layers}.{ours}": theirs for ours, theirs in _TASK_HEAD.items()} | {"classifier": "classifier"},
    )
    for reads, architecture, layers in (
        ("sequence", "ModernBertForSequenceClassification", "pooler"),
        ("span", "ModernBertForQuestionAnswering", "token_layers.0"),
    )
}

_FIXED_ARCHITECTURE = {
    "model_type": "modernbert",
    "hidden_activation": "gelu",
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "classifier_pooling": "cls",
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
"""Keys of config.json for which our model has only one value, which is also transformers' default."""

_TASK_ALONE = ("classifier_pooling",)
"""Keys of config.json that a masked-language model does not read."""

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_EVERY = "global_attn_every_n_layers"

_DEFAULTS = ModernBertConfig(kind="modernbert")


class _Rotations(Section):
    full_attention: PlainRopeParameters | None = None
    sliding_attention: PlainRopeParameters | None = None


class _ConfigFile(UsualConfigFile):
    norm_eps: Positive = _DEFAULTS.norm_epsilon
    local_attention: Annotated[Size, Field(ge=2)] = 2 * _DEFAULTS.window
    global_attn_every_n_layers: Size = _DEFAULTS.global_every_layers
    layer_types: list[Any] | None = None
    global_rope_theta: Positive = _DEFAULTS.rotary_base
    local_rope_theta: Positive = ROTARY_BASE
    rope_parameters: _Rotations | None = None


def tensor_names(model: ModernBert) -> list[TensorName]:
    """Returns the name of every parameter in transformers."""
    names = dict(_SINGLE_TENSORS)
    for layer in range(len(model.blocks)):
        for ours, theirs in _BLOCK_PARTS.items():
            if layer > 0 or ours != "attention_norm":
                names[f"blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return [TensorName(ours=ours, theirs=(theirs,)) for ours, theirs in names.items()]


def plain_weights(model: ModernBert, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trained tensors, each once. Raises: CheckpointError if the decoder is not the token embedding."""
    found = dict(weights)
    untied(found, _DECODER, _EMBEDDING)
    return found


def config_values(model: ModernBert, padding_id: int) -> dict[str, Any]:
    """Returns the content of config.json; releases before the fifth read the bases and the distance of global layers.

    Of special tokens the padding's id alone is known here; the tokenizer has the others.
    """
    config = model.config
    return _FIXED_ARCHITECTURE | {
        "architectures": ["ModernBertForMaskedLM"],
        **usual_values(model),
        "intermediate_size": config.shape["feed_forward_size"],
        "norm_eps": config.norm_epsilon,
        "local_attention": 2 * config.window,
        _EVERY: config.global_every_layers,
        "layer_types": _layer_types(config),
        "global_rope_theta": config.rotary_base,
        "local_rope_theta": config.local_rotary_base,
        "rope_parameters": {
            _GLOBAL: {"rope_type": "default", "rope_theta": config.rotary_base},
            _LOCAL: {"rope_type": "default", "rope_theta": config.local_rotary_base},
        },
        "embedding_dropout": config.dropout,
        "mlp_dropout": config.dropout,
        "attention_dropout": config.dropout_of_attention,
        "initializer_range": INITIAL_DEVIATION,
        "initializer_cutoff_factor": ModernBert.initial_cutoff,
        "pad_token_id": padding_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "cls_token_id": None,
        "sep_token_id": None,
        "dtype": "float32",
    }


def read_config(values: Mapping[str, Any], origin: str) -> tuple[ModernBertConfig, dict[str, int]]:
    """Returns the `model:` section that computes what config.json describes, and the sizes of its tables.

    Dropout is the run's choice and is 0 here.

    Raises: CheckpointError if we do not compute such a model.
    """
    fixed = {key: value for key, value in _FIXED_ARCHITECTURE.items() if key not in _TASK_ALONE}
    found = check_config(values, fixed, _ConfigFile, origin)
    rotations = found.rope_parameters or _Rotations()
    section = {
        "kind": "modernbert",
        **found.section,
        "feed_forward_size": found.intermediate_size,
        "norm_epsilon": found.norm_eps,
        "window": found.local_attention // 2,
        "global_every_layers": _global_every(found),
        "rotary_base": (rotations.full_attention or PlainRopeParameters()).base(found.global_rope_theta),
        "local_rotary_base": (rotations.sliding_attention or PlainRopeParameters()).base(found.local_rope_theta),
    }
    config = checked(section, ModernBertConfig, origin)
    if found.layer_types not in (None, _layer_types(config)):
        raise CheckpointError(
            f"{origin}: layer_types must be {_GLOBAL} in the first layer and then in every n-th, with {_LOCAL} in all "
            f"others; found {', '.join(map(str, found.layer_types or ()))}"
        )
    return config, found.sizes


def config_for_weights(config: ModernBertConfig, names: Collection[str], origin: str) -> ModernBertConfig:
    """Returns the section as it is: config.json describes the model completely.

    Raises: CheckpointError for weights without the masked-token head, such as a bare `ModernBertModel`'s.
    """
    if _HEAD not in names:
        raise CheckpointError(
            f"{origin} has no masked-token head ({_HEAD}): expected a ModernBertForMaskedLM, found the encoder alone; "
            "save the whole pretraining model"
        )
    return config


def _layer_types(config: ModernBertConfig) -> list[str]:
    return [_GLOBAL if window is None else _LOCAL for window in config.attention_windows]


def _global_every(found: _ConfigFile) -> int:
    """Returns the distance of global layers: by the list of layers, which later releases prefer, or as a number."""
    kinds = found.layer_types
    if kinds is None:
        return found.global_attn_every_n_layers
    return next((layer for layer, kind in enumerate(kinds) if layer and kind == _GLOBAL), max(len(kinds), 1))


MODERNBERT_MAPPING = HuggingFaceMapping(
    model_type="modernbert",
    special_token="padding",
    input_names=("input_ids", "attention_mask"),
    tensor_names=tensor_names,
    plain_weights=plain_weights,
    config_values=config_values,
    read_config=read_config,
    config_for_weights=config_for_weights,
    task_models=_TASK_MODELS,
)
