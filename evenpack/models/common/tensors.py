"""The names of a model's tensors in other codes, and copies of them in both directions.

A family describes its counterpart in transformers by a `HuggingFaceMapping`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from evenpack.config import Section, SectionT, validate
from evenpack.errors import CheckpointError, ConfigError
from evenpack.models.common.section import ROTARY_BASE, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class TensorName:
    """The name and layout of one of our parameters in another code."""

    ours: str
    theirs: tuple[str, ...]
    """Its names; several if our parameter holds their tensors concatenated along the first dimension."""
    is_transposed: bool = False
    """Whether the other code stores the matrix as input x output."""
    rows: tuple[int, ...] | None = None
    """Rows of each of their tensors in ours; None: equal parts."""

    def parts_of(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Returns the part of our parameter that each of their tensors holds, in their layout."""
        parts = parameter.chunk(len(self.theirs)) if self.rows is None else parameter.split_with_sizes(self.rows)
        return tuple(part.t() if self.is_transposed else part for part in parts)


@dataclass(frozen=True, kw_only=True)
class NamedWeights:
    """Weights that were read for a model and not yet compared with it."""

    config: TransformerConfig
    """The `model:` section that computes with them."""
    tensors: Mapping[str, Tensor]
    """Tensors by their original names, on the CPU."""
    names: Sequence[TensorName]
    """Name of each parameter of the model in the other code."""
    notes: tuple[str, ...]
    """Notes for the log."""


def renamed(ours: str, *theirs: str) -> list[TensorName]:
    """Returns the names of a layer's weight and bias, where both codes have the same layout."""
    return [
        TensorName(ours=f"{ours}.{kind}", theirs=tuple(f"{name}.{kind}" for name in theirs))
        for kind in ("weight", "bias")
    ]


@torch.no_grad()
def load_tensors(model: nn.Module, names: Sequence[TensorName], weights: Mapping[str, Tensor]) -> None:
    """Fills the parameters of `model`, whose device and dtype stay.

    Raises: CheckpointError if a tensor is missing, of another shape or unknown; nothing is loaded in that case.
    """
    parameters = dict(model.named_parameters())
    unknown = sorted(weights.keys() - {theirs for name in names for theirs in name.theirs})
    if unknown:
        raise CheckpointError(
            f"{unknown[0]} has no place in a {type(model).__name__} of {_layers(names)} layers: the checkpoint belongs "
            "to another model section"
        )
    parts = [
        (part, theirs)
        for name in names
        for part, theirs in zip(name.parts_of(parameters[name.ours]), name.theirs, strict=True)
    ]
    for part, theirs in parts:
        expected = tuple(part.shape)
        if theirs not in weights:
            raise CheckpointError(f"{theirs} is missing, expected a tensor of shape {expected}")
        if tuple(weights[theirs].shape) != expected:
            raise CheckpointError(
                f"{theirs} must have shape {expected}, found {tuple(weights[theirs].shape)}: the checkpoint belongs to "
                "another model section, vocabulary or number of positions"
            )
    for name in names:
        fill_parameter(parameters[name.ours], name, weights)


@torch.no_grad()
def fill_parameter(parameter: Tensor, name: TensorName, weights: Mapping[str, Tensor]) -> None:
    """Fills one parameter, which has the shape of its tensors."""
    for part, theirs in zip(name.parts_of(parameter), name.theirs, strict=True):
        part.copy_(weights[theirs])


def untied(weights: dict[str, Tensor], name: str, tied_to: str) -> None:
    """Removes the tensor called `name` from `weights`, if present.

    Raises: CheckpointError if it differs from the one called `tied_to`.
    """
    tensor = weights.pop(name, None)
    if tensor is not None and tied_to in weights and not torch.equal(tensor, weights[tied_to]):
        raise CheckpointError(f"{name} differs from {tied_to}, expected a tied LM head")


Size = Annotated[int, Field(strict=True, ge=1, le=1 << 31)]
"""A size in config.json; "2", null and 2.0 are refused."""

Positive = Annotated[float, Field(strict=True, gt=0.0)]
"""A number in config.json."""


class ConfigFile(Section, extra="ignore"):
    """Base of the keys that a family reads from config.json; others are ignored."""


_USUAL_SHAPE = {"layers": "num_hidden_layers", "hidden_size": "hidden_size", "heads": "num_attention_heads"}
"""Keys of most models' config.json, by those of `TransformerConfig.shape`."""


class UsualConfigFile(ConfigFile):
    """The sizes, under the names that most models of transformers give them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size

    @property
    def section(self) -> dict[str, Any]:
        """The keys of a `model:` section that they give."""
        shape = {ours: getattr(self, theirs) for ours, theirs in _USUAL_SHAPE.items()}
        return shape | {"max_positions": self.max_position_embeddings}

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the model's tables."""
        return {"vocabulary_size": self.vocab_size, "max_positions": self.max_position_embeddings}


def usual_values(model: Any) -> dict[str, Any]:
    """Returns the sizes of a model as config.json has them, without `intermediate_size`."""
    sizes = {"vocab_size": model.vocabulary_size, "max_position_embeddings": model.max_positions}
    return sizes | {theirs: model.config.shape[ours] for ours, theirs in _USUAL_SHAPE.items()}


class RopeParameters(Section):
    """Base of transformers' `rope_parameters`."""

    rope_theta: Positive = ROTARY_BASE

    def base(self, otherwise: float) -> float:
        """Returns `rope_theta`, or `otherwise` if the file does not have it here."""
        return self.rope_theta if "rope_theta" in self.model_fields_set else otherwise


class PlainRopeParameters(RopeParameters):
    """Rotations that are not scaled."""

    rope_type: Literal["default"] = "default"


def check_config(values: Mapping[str, Any], fixed: Mapping[str, Any], schema: type[SectionT], origin: str) -> SectionT:
    """Returns the keys of config.json that `schema` has, checked; `fixed` ones have their value or are absent.

    Raises: CheckpointError that names the key.
    """
    for key, expected in fixed.items():
        if values.get(key, expected) != expected:
            raise CheckpointError(f"{origin}: {key} must be {expected!r}, found {values[key]!r}")
    return checked(values, schema, origin)


def checked(values: Mapping[str, Any], schema: type[SectionT], origin: str) -> SectionT:
    """Returns `values` as `schema`. Raises: CheckpointError that names each key that does not fit."""
    try:
        return validate(dict(values), schema, origin=origin)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _layers(names: Sequence[TensorName]) -> int:
    return len({name.ours.split(".")[1] for name in names if name.ours.startswith("blocks.")})


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
    config_for_weights: Callable[[Any, Collection[str], str], Any] = lambda config, names, origin: config
    """(section, names of the weights, origin): the section, completed by what only the weights show. By default as it
    is: config.json describes the model completely."""
    task_models: Mapping[str, TaskModel] = field(default_factory=dict)
    """The models with a task's head on an encoder, by what the head reads: `sequence`, `span`."""
