"""The names that transformers gives to the parts of a BERT.

`BertForPreTraining` keeps query, key and value apart; ours are one matrix. Its decoder's matrix and bias are the token
embedding and `cls.predictions.bias`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common.layers import BERT_NORM_EPSILON
from evenpack.models.common.section import FEED_FORWARD_RATIO
from evenpack.models.common.tensors import (
    HuggingFaceMapping,
    Size,
    TaskModel,
    TensorName,
    UsualConfigFile,
    check_config,
    checked,
    renamed,
    untied,
    usual_values,
)
from evenpack.models.common.transformer import INITIAL_DEVIATION

_EMBEDDINGS = "bert.embeddings."
_WORD_EMBEDDINGS = f"{_EMBEDDINGS}word_embeddings.weight"
_DECODER = "cls.predictions.decoder."
_DECODER_BIAS = "cls.predictions.bias"
_NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")

_ENCODER = (_EMBEDDINGS, "bert.encoder.")

_TASK_MODELS = {
    "sequence": TaskModel(
        architecture="BertForSequenceClassification",
        encoder=_ENCODER,
        head={"pooler": "bert.pooler.dense", "classifier": "classifier"},
    ),
    "span": TaskModel(architecture="BertForQuestionAnswering", encoder=_ENCODER, head={"classifier": "qa_outputs"}),
}

_CONSTANTS = (f"{_EMBEDDINGS}position_ids", f"{_EMBEDDINGS}token_type_ids")
"""Tensors that old checkpoints carry besides the weights."""

_SINGLE_TENSORS = {
    "token_embedding.weight": _WORD_EMBEDDINGS,
    "positions.table.weight": f"{_EMBEDDINGS}position_embeddings.weight",
    "token_type_embedding.weight": f"{_EMBEDDINGS}token_type_embeddings.weight",
    "masked_token_head.decoder_bias": _DECODER_BIAS,
}

_LAYERS = {
    "embedding_norm": f"{_EMBEDDINGS}LayerNorm",
    "masked_token_head.dense": "cls.predictions.transform.dense",
    "masked_token_head.norm": "cls.predictions.transform.LayerNorm",
}

_NEXT_SENTENCE_LAYERS = {
    "next_sentence_head.pooler": "bert.pooler.dense",
    "next_sentence_head.classifier": "cls.seq_relationship",
}

_BLOCK_PARTS = {
    "attention.query_key_value": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feed_forward.expand": ("intermediate.dense",),
    "feed_forward.contract": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}

_FIXED_ARCHITECTURE = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": BERT_NORM_EPSILON,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Keys of config.json for which our model has only one value, which is also transformers' default."""


class _ConfigFile(UsualConfigFile):
    type_vocab_size: Size


def tensor_names(model: Bert) -> list[TensorName]:
    """Returns the name of every parameter in transformers."""
    names = [TensorName(ours=ours, theirs=(theirs,)) for ours, theirs in _SINGLE_TENSORS.items()]
    layers = _LAYERS if model.next_sentence_head is None else _LAYERS | _NEXT_SENTENCE_LAYERS
    for ours, theirs in layers.items():
        names += renamed(ours, theirs)
    for layer in range(len(model.blocks)):
        for ours, parts in _BLOCK_PARTS.items():
            names += renamed(f"blocks.{layer}.{ours}", *(f"bert.encoder.layer.{layer}.{part}" for part in parts))
    return names


def plain_weights(model: Bert, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trained tensors that `model` has, each once, under the names of today's transformers.

    Raises: CheckpointError if the decoder is not the token embedding or has two biases.
    """
    found = {_current_name(name): tensor for name, tensor in weights.items() if name not in _CONSTANTS}
    if _DECODER_BIAS not in found and f"{_DECODER}bias" in found:
        found[_DECODER_BIAS] = found[f"{_DECODER}bias"]
    untied(found, f"{_DECODER}bias", _DECODER_BIAS)
    untied(found, f"{_DECODER}weight", _WORD_EMBEDDINGS)
    if model.next_sentence_head is None:
        found = {name: tensor for name, tensor in found.items() if not name.startswith(_NEXT_SENTENCE)}
    return found


def config_values(model: Bert, padding_id: int) -> dict[str, Any]:
    """Returns the content of config.json."""
    dropout = model.config.dropout
    architecture = "BertForMaskedLM" if model.next_sentence_head is None else "BertForPreTraining"
    return _FIXED_ARCHITECTURE | {
        "architectures": [architecture],
        **usual_values(model),
        "type_vocab_size": model.config.token_types,
        "intermediate_size": FEED_FORWARD_RATIO * model.config.shape["hidden_size"],
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": model.config.dropout_of_attention,
        "initializer_range": INITIAL_DEVIATION,
        "pad_token_id": padding_id,
        "dtype": "float32",
    }


def read_config(values: Mapping[str, Any], origin: str) -> tuple[BertConfig, dict[str, int]]:
    """Returns the `model:` section that computes what config.json describes, and the sizes of its tables.

    Dropout is the run's choice and is 0 here.

    Raises: CheckpointError if we do not compute such a model.
    """
    found = check_config(values, _FIXED_ARCHITECTURE, _ConfigFile, origin)
    inner = FEED_FORWARD_RATIO * found.hidden_size
    if found.intermediate_size != inner:
        raise CheckpointError(f"{origin}: intermediate_size must be {inner}, found {found.intermediate_size}")
    section = {"kind": "bert", **found.section, "token_types": found.type_vocab_size, "dropout": 0.0}
    return checked(section, BertConfig, origin), found.sizes


def config_for_weights(config: BertConfig, names: Collection[str], origin: str) -> BertConfig:
    """Returns the section without next-sentence prediction where the weights have no head for it.

    Raises: CheckpointError for weights without the head that every BERT here has, such as a bare `BertModel`'s.
    """
    if not any(name.startswith("cls.predictions.transform.") for name in names):
        raise CheckpointError(
            f"{origin} has no masked-token head (cls.predictions.*): expected a BertForPreTraining or BertForMaskedLM, "
            "found the encoder alone; save the whole pretraining model"
        )
    has_next_sentence_head = any(name.startswith("cls.seq_relationship.") for name in names)
    return config if has_next_sentence_head else config.model_copy(update={"next_sentence": False})


def _current_name(name: str) -> str:
    """Renames a norm's gamma and beta, as checkpoints converted from TensorFlow have them, to weight and bias."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


BERT_MAPPING = HuggingFaceMapping(
    model_type="bert",
    special_token="padding",
    input_names=("input_ids", "token_type_ids", "attention_mask"),
    tensor_names=tensor_names,
    plain_weights=plain_weights,
    config_values=config_values,
    read_config=read_config,
    config_for_weights=config_for_weights,
    task_models=_TASK_MODELS,
)
