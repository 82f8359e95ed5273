"""A family's description of the model of the same kind in transformers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from evenpack.models.common.tensors import TensorName


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """The model in transformers that has a task's head in place of the pretraining heads."""

    architecture: str
    encoder: tuple[str, ...]
    """Prefix of the names of the encoder's tensors; all other tensors belong to the head."""
    head: Mapping[str, str]
    """Transformers' names of the head's layers, by ours."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMapping:
    """Names and keys of one kind of model, in transformers and here."""

    model_type: str
    """`model_type` in config.json."""
    special_token: Literal["end_of_text", "padding"]
    """The special token whose id config.json names."""
    input_names: tuple[str, ...]
    """The inputs that its tokenizer gives the model."""
    tensor_names: Callable[[Any], list[TensorName]]
    """(model): the name of every parameter in transformers. Raises ConfigError if it has no such model."""
    plain_weights: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]]
    """(model, weights): the trained tensors that the model has, each once, under today's names."""
    config_values: Callable[[Any, int], dict[str, Any]]
    """(model, special token's id): the content of config.json."""
    read_config: Callable[[Mapping[str, Any], str], tuple[Any, dict[str, int]]]
    """(values, origin): the `model:` section that computes what config.json describes, and the sizes of its tables.
    Raises CheckpointError if we do not compute such a model."""
    config_for_weights: Callable[[Any, Collection[str], str], Any]
    """(section, names of the weights, origin): the section, completed by what only the weights show."""
    task_models: Mapping[str, TaskModel] = field(default_factory=dict)
    """The models with a task's head on an encoder, by what the head reads: `sequence`, `span`."""
