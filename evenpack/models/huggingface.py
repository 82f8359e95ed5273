"""Reads weights from, and writes them to, checkpoint directories of transformers.

    directory  ->  config.json + weights  ->  FAMILY/huggingface.py: names, section  ->  common/tensors.py

The numbers are the same in both; names and layout differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from evenpack.errors import CheckpointError, ConfigError, RunError
from evenpack.files import atomic_directory, explained, read_json, require_new_folder, write_json
from evenpack.models.build import Model, new_model
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.tensors import (
    HuggingFaceMapping,
    NamedWeights,
    TaskModel,
    TensorName,
    load_tensors,
    renamed,
)
from evenpack.models.families import family_of, find_family, known_families
from evenpack.units import FP32_BYTES

SHARD_BYTES = 5_000_000_000
"""Weights of a larger model are written in several files of at most so many bytes each."""

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)


def to_huggingface(
    model: Model,
    directory: Path,
    *,
    tokenizer_dir: Path | None,
    special_token_id: int,
    beginning_id: int | None = None,
) -> None:
    """Writes a directory that transformers loads, with equal logits.

    config.json names the class to load (`architectures`). The directory is renamed to its final name once it is
    complete and on disk.

    Args:
        model: on any device. Weights are written in FP32, above `SHARD_BYTES` in several files.
        directory: must not exist yet, or be empty.
        tokenizer_dir: its tokenizer files are copied, and list the inputs that the model takes; None leaves them out.
        special_token_id: the id of the mapping's `special_token`, written to config.json.
        beginning_id: the token that documents begin with, for the configurations that have one; None: those of the
            mapping stay.

    Raises: ConfigError if transformers has no such model, the id is outside the vocabulary, the directory has content,
    or there is no tokenizer in `tokenizer_dir`; RunError if the disk does not take it.
    """
    mapping = mapping_of(model.config)
    names = mapping.tensor_names(model)
    if not 0 <= special_token_id < model.vocabulary_size:
        raise ConfigError(
            f"special_token_id must be an entry of the model's vocabulary (0 to {model.vocabulary_size - 1}), "
            f"found {special_token_id}"
        )
    require_new_folder(directory)
    tokenizer = {} if tokenizer_dir is None else _read_tokenizer(tokenizer_dir)
    with _new_directory(directory) as unfinished:
        for name, content in tokenizer.items():
            (unfinished / name).write_bytes(content)
        _write_model_inputs(unfinished / _TOKENIZER_CONFIG, model)
        values = mapping.config_values(model, special_token_id)
        if beginning_id is not None and "bos_token_id" in values:
            values["bos_token_id"] = beginning_id
        _write_model(unfinished, named_parameters(model, names), values)


def task_model_to_huggingface(
    encoder: Model,
    head: nn.Module,
    reads: str,
    directory: Path,
    *,
    save_tokenizer: Callable[[Path], None],
    special_token_id: int,
    about_task: Mapping[str, Any],
) -> None:
    """Writes an encoder with a task's head as a directory that transformers loads, with equal logits.

    An existing directory is replaced once the new one is complete and on disk.

    Args:
        encoder: on any device; its pretraining heads are left out. Weights are written in FP32.
        head: its layers are named in the family's `TaskModel`.
        reads: `sequence` or `span`.
        save_tokenizer: writes the tokenizer's files into a folder.
        special_token_id: as in `to_huggingface`.
        about_task: further keys of config.json: labels, kind of problem.

    Raises: ConfigError if transformers has no such model; RunError if the disk does not take it.
    """
    task, mapping = task_model_of(encoder.config, reads), mapping_of(encoder.config)
    names = [name for name in mapping.tensor_names(encoder) if all(one.startswith(task.encoder) for one in name.theirs)]
    parameters, trained = named_parameters(encoder, names), dict(head.named_parameters())
    for ours, theirs in task.head.items():
        parameters += named_parameters(head, [name for name in renamed(ours, theirs) if name.ours in trained])
    values = mapping.config_values(encoder, special_token_id) | {"architectures": [task.architecture], **about_task}
    with _new_directory(directory, replaces=True) as unfinished:
        save_tokenizer(unfinished)
        _write_model_inputs(unfinished / _TOKENIZER_CONFIG, encoder)
        _write_model(unfinished, parameters, values)


def from_huggingface(directory: Path) -> Model:
    """Builds the model that a transformers checkpoint directory describes, weights included, on the CPU in FP32.

    Raises: CheckpointError if files are missing or broken, or no family computes this model (each differing key is
    named). ConfigError if several do.
    """
    model, weights = read_huggingface(directory)
    model.to_empty(device="cpu")
    load_tensors(model, weights.names, weights.tensors)
    return model


def read_huggingface(directory: Path) -> tuple[Model, NamedWeights]:
    """Returns the model that such a directory describes, with shapes alone, and its weights.

    The weights are mapped from the files, so that they take no memory of the process before they are copied.

    Raises: as `from_huggingface`, but for tensors that are missing, surplus or of another shape.
    """
    path = directory / "config.json"
    values = read_description(path)
    mapping = _mapping_for(values, path)
    config, sizes = mapping.read_config(values, str(path))
    tensors = _read_weights(directory)
    config = mapping.config_for_weights(config, tensors.keys(), str(directory))
    with torch.device("meta"):
        model = new_model(config, attention_backend="auto", **sizes)
    tensors = mapping.plain_weights(model, tensors)
    return model, NamedWeights(config=config, tensors=tensors, names=mapping.tensor_names(model), notes=())


def mapping_of(config: TransformerConfig) -> HuggingFaceMapping:
    """Returns the family's description of transformers. Raises: ConfigError if transformers has no such model."""
    mapping = family_of(config).load_huggingface()
    if mapping is None:
        raise ConfigError(f"transformers has no model of family '{config.kind}' to exchange weights with")
    return mapping


def task_model_of(config: TransformerConfig, reads: str) -> TaskModel:
    """Returns transformers' model with a head that reads sequences, or spans. Raises: ConfigError if there is none."""
    found = mapping_of(config).task_models.get(reads)
    if found is None:
        raise ConfigError(f"transformers has no model of family '{config.kind}' with a head of kind '{reads}'")
    return found


def _mapping_for(values: Mapping[str, Any], path: Path) -> HuggingFaceMapping:
    """Returns the mapping for model_type, which the oldest checkpoints, all of them GPT-2's, do not have."""
    families = [find_family(name).load_huggingface() for name in known_families()]
    mappings = {mapping.model_type: mapping for mapping in families if mapping is not None}
    model_type = values.get("model_type", "gpt2")
    if not isinstance(model_type, str) or model_type not in mappings:
        known = ", ".join(sorted(mappings))
        raise CheckpointError(f"{path}: model_type must be one of {known}, found {model_type!r}")
    return mappings[model_type]


NamedParameters = list[tuple[Tensor, TensorName]]


def named_parameters(module: nn.Module, names: Sequence[TensorName]) -> NamedParameters:
    """Returns parameters with their names in transformers."""
    parameters = dict(module.named_parameters())
    return [(parameters[name.ours].detach(), name) for name in names]


def exported(parameters: NamedParameters) -> dict[str, Tensor]:
    """Returns parameters under their names in transformers: FP32 copies on the CPU."""
    return {
        theirs: part.to("cpu", torch.float32, copy=True).contiguous()
        for parameter, name in parameters
        for theirs, part in zip(name.theirs, name.parts_of(parameter), strict=True)
    }


def shards_of(parameters: NamedParameters, shard_bytes: int) -> list[NamedParameters]:
    """Returns the parameters in order, in as many groups as hold `shard_bytes` in FP32; a larger one is alone."""
    shards: list[NamedParameters] = [[]]
    room = shard_bytes
    for parameter, name in parameters:
        size = FP32_BYTES * parameter.numel()
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((parameter, name))
        room -= size
    return shards


def _write_model(directory: Path, parameters: NamedParameters, values: Mapping[str, Any]) -> None:
    """Writes config.json and the weights: one file, or shards and an index, of which one at a time is copied."""
    config = directory / "config.json"
    write_json(config, values)
    shards = shards_of(parameters, SHARD_BYTES)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = _ONE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = exported(shard)
        save_file(weights, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(config.stat().st_mode)  # safetensors lets nobody but its writer read the file
        files |= dict.fromkeys(weights, name)
    if len(shards) > 1:
        total = sum(FP32_BYTES * parameter.numel() for parameter, _ in parameters)
        write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": files})


@contextmanager
def _new_directory(directory: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Makes a directory as `atomic_directory` does. Raises: RunError that names it if it cannot be written."""
    try:
        with explained(directory, action="written"), atomic_directory(directory, replaces=replaces) as unfinished:
            yield unfinished
    except SafetensorError as error:  # its own for a full disk
        raise RunError(f"{directory} cannot be written: {error}; make room on its disk, or choose another") from error


def _read_tokenizer(tokenizer_dir: Path) -> dict[str, bytes]:
    """Returns the tokenizer's files by name, read before anything is written: a full disk is not their fault."""
    present = [name for name in _TOKENIZER_FILES if (tokenizer_dir / name).is_file()]
    if not present:
        raise ConfigError(f"{tokenizer_dir} holds no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    return {name: (tokenizer_dir / name).read_bytes() for name in present}


def _write_model_inputs(path: Path, model: Model) -> None:
    """Writes the model's inputs into the tokenizer's files, because defaults of transformers differ between versions.

    Without token types BERT would take both halves of a pair for the first; GPT-2 would add the types up as tokens.
    """
    if path.is_file():
        write_json(path, read_description(path) | {"model_input_names": list(mapping_of(model.config).input_names)})


def read_description(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file beside weights. Raises: CheckpointError if it is missing or broken."""
    try:
        return read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; expected a checkpoint directory of transformers") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_weights(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        if path.exists() and not path.is_file():  # reading a FIFO would wait for its writer
            raise CheckpointError(f"{path} is not a file; expected weights in safetensors format")
        try:
            weights |= load_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist; expected weights in safetensors format") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is broken or not in safetensors format: {error}") from error
    return weights


def _weight_files(directory: Path) -> Iterator[Path]:
    """Yields one file, or the shards that an index lists. Raises: CheckpointError for an index without such a list."""
    index = directory / _INDEX
    if not index.is_file():
        return iter([directory / _ONE_FILE])
    names = read_description(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(
            f"{index} must name the file of each tensor in its weight_map: copy it again from the source of the weights"
        )
    return (directory / name for name in sorted(set(names.values())))
