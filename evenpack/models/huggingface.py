"""Weights to and from checkpoint directories of transformers, GPT-2's and BERT's.

    directory  ->  config.json + weights  ->  huggingface_gpt2 | huggingface_bert: names, shape  ->  huggingface_tensors

The numbers are the same there and here; names and layout differ.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenpack.errors import CheckpointError, ConfigError
from evenpack.files import atomic_directory, write_json
from evenpack.models import huggingface_bert, huggingface_gpt2
from evenpack.models.bert import Bert
from evenpack.models.families import Model, new_model
from evenpack.models.huggingface_tensors import export_tensors, load_tensors

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


def to_huggingface(model: Model, directory: Path, *, tokenizer_dir: Path | None, special_token_id: int) -> None:
    """Writes a directory that transformers loads, with equal logits.

    A GPT-2 becomes a `GPT2LMHeadModel`, a BERT a `BertForPreTraining`, or a `BertForMaskedLM` if it was built without
    next-sentence prediction. The directory takes its name once it is whole and on disk.

    Args:
        model: with learned positions; on any device. Weights are written in FP32.
        directory: must not exist yet, or be empty.
        tokenizer_dir: its tokenizer files are copied along, and told which inputs the model takes; None leaves them
            out.
        special_token_id: what config.json names. For GPT-2 the begin- and end-of-text id, for BERT the padding id.

    Raises: ConfigError if the model uses ALiBi, the id is outside the vocabulary, the directory has content, or
    there is no tokenizer in `tokenizer_dir`.
    """
    weights = huggingface_weights(model)
    if not 0 <= special_token_id < model.vocabulary_size:
        raise ConfigError(
            f"special_token_id must be an entry of the model's vocabulary (0 to {model.vocabulary_size - 1}), "
            f"found {special_token_id}"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; name a new one or remove it")
    with atomic_directory(directory) as unfinished:
        if tokenizer_dir is not None:
            _copy_tokenizer(tokenizer_dir, unfinished)
            _tell_model_inputs(unfinished / _TOKENIZER_CONFIG, model)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        write_json(unfinished / "config.json", _config_values(model, special_token_id))


def from_huggingface(directory: Path, *, attention_backend: str = "auto") -> Model:
    """Builds the model that a transformers checkpoint directory describes, weights included, on the CPU in FP32.

    Raises: CheckpointError if files are missing or broken, or the model there is neither a GPT-2 nor a BERT as we
    compute them (each differing key is named).
    """
    path = directory / "config.json"
    values = _read_json(path)
    kind = values.get("model_type", "gpt2")
    if kind not in ("gpt2", "bert"):
        raise CheckpointError(f"{path}: model_type must be gpt2 or bert, found {kind!r}")
    translation = huggingface_bert if kind == "bert" else huggingface_gpt2
    config, sizes = translation.read_config(values, str(path))
    weights = _read_weights(directory)
    if kind == "bert":
        huggingface_bert.require_masked_token_head(weights, origin=str(directory))
        if not huggingface_bert.has_next_sentence_head(weights):
            config = config.model_copy(update={"next_sentence": False})
    with torch.device("meta"):
        model = new_model(config, attention_backend=attention_backend, **sizes)
    model.to_empty(device="cpu")
    load_huggingface_weights(model, weights)
    return model


def huggingface_weights(model: Model) -> dict[str, Tensor]:
    """The model's weights under transformers' names and in its layout: FP32 copies on the CPU; tied ones come once.

    Raises: ConfigError if the model uses ALiBi.
    """
    if isinstance(model, Bert):
        return export_tensors(model, huggingface_bert.tensor_names(model))
    return export_tensors(model, huggingface_gpt2.tensor_names(model))


def load_huggingface_weights(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Fills `model` from the state dict of a GPT2LMHeadModel or GPT2Model, of a BertForPreTraining or BertForMaskedLM.

    The model's device and dtype stay. A BERT without next-sentence prediction leaves the pooler and that head out.

    Raises: ConfigError if the model uses ALiBi. CheckpointError if a tensor is missing, of another shape, unknown, or
    if the output matrix is not the token embedding; nothing has been loaded then.
    """
    if isinstance(model, Bert):
        names = huggingface_bert.tensor_names(model)
        load_tensors(model, names, huggingface_bert.plain_weights(model, weights))
    else:
        names = huggingface_gpt2.tensor_names(model)
        load_tensors(model, names, huggingface_gpt2.plain_weights(weights))


def _config_values(model: Model, special_token_id: int) -> dict[str, Any]:
    if isinstance(model, Bert):
        return huggingface_bert.config_values(model, padding_id=special_token_id)
    return huggingface_gpt2.config_values(model, end_of_text_id=special_token_id)


def _copy_tokenizer(tokenizer_dir: Path, directory: Path) -> None:
    present = [name for name in _TOKENIZER_FILES if (tokenizer_dir / name).is_file()]
    if not present:
        raise ConfigError(f"{tokenizer_dir} holds no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    for name in present:
        shutil.copyfile(tokenizer_dir / name, directory / name)


def _tell_model_inputs(path: Path, model: Model) -> None:
    """What the tokenizer hands to the model; defaults of transformers differ between versions.

    Without token types both halves of a pair would be the first one to BERT; GPT-2 would add them up as tokens.
    """
    if path.is_file():
        types = ["token_type_ids"] if isinstance(model, Bert) else []
        write_json(path, _read_json(path) | {"model_input_names": ["input_ids", *types, "attention_mask"]})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; expected a checkpoint directory of transformers") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values


def _read_weights(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            weights |= load_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist; expected weights in safetensors format") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is broken or not in safetensors format: {error}") from error
    return weights


def _weight_files(directory: Path) -> Iterator[Path]:
    """One file, or the shards that an index lists."""
    index = directory / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    return (directory / name for name in names)
