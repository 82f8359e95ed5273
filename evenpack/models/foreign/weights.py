"""Weights of TensorFlow's checkpoints of a BERT, matched with a model.

    file  ->  tensor_bundle.py: tensors by their names there  ->  here

Such a checkpoint does not describe its model, so the model to be filled is what it is compared with. The MLPerf
reference has Google's names.

Source of the names: mlcommons/training, language_model/tensorflow/bert/modeling.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from evenpack.errors import CheckpointError
from evenpack.models.build import Model
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.tensors import NamedWeights, TensorName
from evenpack.models.foreign.tensor_bundle import BundleEntry, TensorBundle
from evenpack.models.huggingface import mapping_of, read_description

_KIND = "bert"
_WORDS = "bert/embeddings/word_embeddings"
_CONFIG_FILE = "bert_config.json"
"""A file with the keys of transformers' config.json, which may be beside the checkpoint."""

_NORM = {"weight": "gamma", "bias": "beta"}
_MATRIX = {"weight": "kernel", "bias": "bias"}
_OUTPUT = {"weight": "output_weights", "bias": "output_bias"}


def read_tensorflow(prefix: Path, like: Model) -> NamedWeights:
    """Reads a checkpoint of TensorFlow's graph mode, without optimizer moments and single numbers such as the step.

    Args:
        prefix: path without `.index`.
        like: the model that is to be filled.

    Raises: CheckpointError if it cannot be read or is not of a BERT.
    """
    bundle = TensorBundle(prefix)
    if _WORDS not in bundle:
        raise CheckpointError(
            f"{prefix} has no {_WORDS}, by which a BERT would be known; it has {', '.join(sorted(bundle)[:3])} and such"
        )
    if like.config.kind != _KIND:
        raise CheckpointError(
            f"{prefix} is of a model with kind {_KIND}, this run has model.kind {like.config.kind}: make them alike, "
            "or name other weights"
        )
    slots, numbers = _slots(bundle.entries), [name for name, entry in bundle.entries.items() if not entry.shape]
    tensors = {name: bundle[name] for name in bundle if name not in slots and name not in numbers}
    aside = [f"optimizer state ({', '.join(sorted(set(slots.values())))})"] if slots else []
    left = ", ".join([*aside, *numbers])
    account = f"{len(tensors)} tensors used" + (f", {len(slots) + len(numbers)} ignored: {left}" if left else "")
    config, notes = _section(prefix.parent / _CONFIG_FILE, like)
    return NamedWeights(
        config=config,
        names=[_in_tensorflow(name) for name in mapping_of(like.config).tensor_names(like)],
        tensors=tensors,
        notes=(account, *notes),
    )


def _slots(entries: Mapping[str, BundleEntry]) -> dict[str, str]:
    """Returns the optimizer state of each weight, with the optimizer's name for it."""
    found = {}
    for name, entry in entries.items():
        weight, _, slot = name.rpartition("/")
        if weight in entries and entries[weight].shape == entry.shape:
            found[name] = slot
    return found


def _in_tensorflow(name: TensorName) -> TensorName:
    theirs = tuple(_variable(each) for each in name.theirs)
    return replace(name, theirs=theirs, is_transposed=theirs[0].endswith("/kernel"))


def _variable(name: str) -> str:
    """Returns Google's name of the variable that transformers calls `name`; a `/kernel` is stored as input x output."""
    layer, _, kind = name.rpartition(".")
    path = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", layer).replace(".", "/")
    if path.endswith("_embeddings"):
        return path
    is_output = path in ("cls/predictions", "cls/seq_relationship")
    kinds = _NORM if path.endswith("LayerNorm") else _OUTPUT if is_output else _MATRIX
    return f"{path}/{kinds[kind]}"


def _section(config_file: Path, like: Model) -> tuple[TransformerConfig, list[str]]:
    """Returns the `model:` section of the file beside the checkpoint, or the model's own with a note that says so."""
    if not config_file.is_file():
        heads = like.config.shape["heads"]
        return like.config, [f"neither a tensor nor a {config_file.name} gives the number of heads: {heads}, as here"]
    return mapping_of(like.config).read_config(read_description(config_file), str(config_file))[0], []
