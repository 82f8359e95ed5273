"""The weights of a model under transformers' names, and back, without files."""

from collections.abc import Mapping

from torch import Tensor

from evenpack.models.build import Model
from evenpack.models.common.tensors import load_tensors
from evenpack.models.huggingface import exported, mapping_of, named_parameters


def huggingface_weights(model: Model) -> dict[str, Tensor]:
    """Returns FP32 copies on the CPU, in transformers' layout; tied ones once."""
    return exported(named_parameters(model, mapping_of(model.config).tensor_names(model)))


def load_huggingface_weights(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Fills a model from the state dict of one in transformers, as `from_huggingface` does from its files."""
    mapping = mapping_of(model.config)
    load_tensors(model, mapping.tensor_names(model), mapping.plain_weights(model, weights))
