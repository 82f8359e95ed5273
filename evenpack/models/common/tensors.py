"""Tensors of one model under the names and in the layout of another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenpack.errors import CheckpointError
from evenpack.models.common.section import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class TensorName:
    """The name and layout of one of our parameters in another code."""

    ours: str
    theirs: tuple[str, ...]
    """Its names; several if our parameter holds their tensors concatenated along the first dimension."""
    is_transposed: bool
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
        TensorName(ours=f"{ours}.{kind}", theirs=tuple(f"{name}.{kind}" for name in theirs), is_transposed=False)
        for kind in ("weight", "bias")
    ]


def export_tensors(model: nn.Module, names: Sequence[TensorName]) -> dict[str, Tensor]:
    """Returns the parameters of `model` under the other code's names: FP32 copies on the CPU."""
    parameters = dict(model.named_parameters())
    weights = {}
    for name in names:
        for theirs, part in zip(name.theirs, name.parts_of(parameters[name.ours].detach()), strict=True):
            weights[theirs] = part.to("cpu", torch.float32, copy=True).contiguous()
    return weights


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
    for part, theirs in parts:
        part.copy_(weights[theirs])


def untied(weights: dict[str, Tensor], name: str, tied_to: str) -> None:
    """Removes the tensor called `name` from `weights`, if present.

    Raises: CheckpointError if it differs from the one called `tied_to`.
    """
    tensor = weights.pop(name, None)
    if tensor is not None and tied_to in weights and not torch.equal(tensor, weights[tied_to]):
        raise CheckpointError(f"{name} differs from {tied_to}, expected a tied LM head")


def check_config(values: Mapping[str, Any], fixed: Mapping[str, Any], required: set[str], origin: str) -> None:
    """Checks config.json: `fixed` keys have their value or are absent, `required` ones are there.

    Raises: CheckpointError that names the key.
    """
    for key, expected in fixed.items():
        if values.get(key, expected) != expected:
            raise CheckpointError(f"{origin}: {key} must be {expected!r}, found {values[key]!r}")
    missing = required - values.keys()
    if missing:
        raise CheckpointError(f"{origin}: {min(missing)} is missing")


def _layers(names: Sequence[TensorName]) -> int:
    return len({name.ours.split(".")[1] for name in names if name.ours.startswith("blocks.")})
