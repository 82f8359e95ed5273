"""What a family says about the model of the same kind in transformers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from evenpack.models.common.tensors import TensorName


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """The model there that has a task's head where pretraining's heads were."""

    architecture: str
    encoder: tuple[str, ...]
    """What the names of the encoder's tensors begin with; it has no others but the head's."""
    head: Mapping[str, str]
    """Names of the head's layers, by ours."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceMapping:
    """Names and keys of one kind of model, there and here."""

    model_type: str
    """Of config.json."""
    special_token: Literal["end_of_text", "padding"]
    """Whose id config.json names."""
    input_names: tuple[str, ...]
    """What its tokenizer hands to the model."""
    tensor_names: Callable[[Any], list[TensorName]]
    """(model): every parameter's name there. Raises ConfigError if transformers has no such model."""
    plain_weights: Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]]
    """(model, weights): the trained tensors that have a place in the model, each once, under today's names."""
    config_values: Callable[[Any, int], dict[str, Any]]
    """(model, special token's id): the content of config.json."""
    read_config: Callable[[Mapping[str, Any], str], tuple[Any, dict[str, int]]]
    """(values, origin): the `model:` section that computes what config.json describes, and the sizes of its tables.
    Raises CheckpointError if we do not compute such a model."""
    config_for_weights: Callable[[Any, Collection[str], str], Any]
    """(section, names of the weights, origin): the section with what only the weights tell."""
    task_models: Mapping[str, TaskModel] = field(default_factory=dict)
    """Of an encoder, by what a head reads: `sequence`, `span`."""
