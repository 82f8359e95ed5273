"""GPT-2 weights to and from checkpoint directories of transformers.

`GPT2LMHeadModel` keeps its matrices as input x output, the transpose of ours, and names them differently; the numbers
are the same. Only learned positions have a counterpart there.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenpack.config import validate
from evenpack.errors import CheckpointError, ConfigError
from evenpack.files import fsync_directory, fsync_file, write_json
from evenpack.models.gpt2 import INITIAL_DEVIATION, Gpt2
from evenpack.models.layers import NORM_EPSILON
from evenpack.models.model_config import Gpt2Config

_PREFIX = "transformer."
"""Of each tensor of GPT2LMHeadModel; checkpoints of the bare GPT2Model, OpenAI's own among them, leave it out."""

_LM_HEAD = "lm_head.weight"

_BLOCK_PARTS = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.contract": "mlp.c_proj",
}

_CAUSAL_MASKS = (".attn.bias", ".attn.masked_bias")
"""Endings of constants that old checkpoints carry beside the weights."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

_FIXED_ARCHITECTURE = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": NORM_EPSILON,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Keys of config.json that our model has no choice in; transformers' defaults are the same."""


def to_huggingface(model: Gpt2, directory: Path, *, tokenizer_dir: Path | None, end_of_text_id: int) -> None:
    """Writes a directory that `transformers.GPT2LMHeadModel.from_pretrained` loads, with equal logits.

    The directory takes its name once it is whole and on disk.

    Args:
        model: with learned positions; on any device. Weights are written in FP32.
        directory: must not exist yet, or be empty.
        tokenizer_dir: its tokenizer files are copied along; None leaves them out.
        end_of_text_id: becomes the begin- and end-of-text id of config.json.

    Raises: ConfigError if the model uses ALiBi, the id is outside the vocabulary, the directory has content, or
    there is no tokenizer in `tokenizer_dir`.
    """
    weights = huggingface_weights(model)
    if not 0 <= end_of_text_id < model.vocabulary_size:
        raise ConfigError(
            f"end_of_text_id must be an entry of the model's vocabulary (0 to {model.vocabulary_size - 1}), "
            f"found {end_of_text_id}"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; name a new one or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        temporary.mkdir()
        if tokenizer_dir is not None:
            _copy_tokenizer(tokenizer_dir, temporary)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        fsync_file(temporary / "model.safetensors")
        write_json(temporary / "config.json", _huggingface_config(model, end_of_text_id))
        fsync_directory(temporary)
        temporary.replace(directory)
        fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def from_huggingface(directory: Path, *, attention_backend: str = "auto") -> Gpt2:
    """Builds the model that a transformers checkpoint directory describes, weights included, on the CPU in FP32.

    Raises: CheckpointError if files are missing or broken, or the model there is another one than GPT-2 as we compute
    it (each differing key is named).
    """
    values = _read_json(directory / "config.json")
    with torch.device("meta"):
        model = Gpt2(
            _our_config(values, directory),
            vocabulary_size=values["vocab_size"],
            max_positions=values["n_positions"],
            attention_backend=attention_backend,
        )
    model.to_empty(device="cpu")
    load_huggingface_weights(model, _read_weights(directory))
    return model


def huggingface_weights(model: Gpt2) -> dict[str, Tensor]:
    """The model's weights under GPT2LMHeadModel's names and in its layout: FP32 copies on the CPU.

    Raises: ConfigError if the model uses ALiBi.
    """
    _require_learned_positions(model)
    parameters = dict(model.named_parameters())
    weights = {}
    for ours, theirs, is_transposed in _names(len(model.blocks)):
        tensor = parameters[ours].detach()
        weights[theirs] = (tensor.t() if is_transposed else tensor).to("cpu", torch.float32, copy=True).contiguous()
    return weights


@torch.no_grad()
def load_huggingface_weights(model: Gpt2, weights: Mapping[str, Tensor]) -> None:
    """Fills `model` from the state dict of a GPT2LMHeadModel or GPT2Model; the model's device and dtype stay.

    Raises: ConfigError if the model uses ALiBi. CheckpointError if a tensor is missing, of another shape, unknown, or
    if the LM head is not the token embedding; nothing has been loaded then.
    """
    _require_learned_positions(model)
    found = {_full_name(name): tensor for name, tensor in weights.items() if not name.endswith(_CAUSAL_MASKS)}
    head = found.pop(_LM_HEAD, None)
    parameters = dict(model.named_parameters())
    names = _names(len(model.blocks))
    unknown = sorted(found.keys() - {theirs for _, theirs, _ in names})
    if unknown:
        raise CheckpointError(f"{unknown[0]} has no place in a GPT-2 of {len(model.blocks)} layers")
    for ours, theirs, is_transposed in names:
        expected = tuple(parameters[ours].t().shape if is_transposed else parameters[ours].shape)
        if theirs not in found:
            raise CheckpointError(f"{theirs} is missing, expected a tensor of shape {expected}")
        if tuple(found[theirs].shape) != expected:
            raise CheckpointError(
                f"{theirs} must have shape {expected}, found {tuple(found[theirs].shape)}: the checkpoint belongs to "
                "another model section, vocabulary or number of positions"
            )
    if head is not None and not torch.equal(head, found[f"{_PREFIX}wte.weight"]):
        raise CheckpointError(f"{_LM_HEAD} differs from {_PREFIX}wte.weight, expected a tied LM head")
    for ours, theirs, is_transposed in names:
        parameters[ours].copy_(found[theirs].t() if is_transposed else found[theirs])


def _names(layers: int) -> list[tuple[str, str, bool]]:
    """Our name of each tensor, theirs, and whether it is stored transposed."""
    pairs = [("token_embedding.weight", f"{_PREFIX}wte.weight"), ("positions.table.weight", f"{_PREFIX}wpe.weight")]
    norms = [("final_norm", f"{_PREFIX}ln_f")]
    blocks = [
        (f"blocks.{layer}.{ours}", f"{_PREFIX}h.{layer}.{theirs}")
        for layer in range(layers)
        for ours, theirs in _BLOCK_PARTS.items()
    ]
    for ours, theirs in blocks + norms:
        pairs += [(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]
    return [(ours, theirs, ".c_" in theirs and theirs.endswith(".weight")) for ours, theirs in pairs]


def _full_name(name: str) -> str:
    return name if name == _LM_HEAD or name.startswith(_PREFIX) else _PREFIX + name


def _require_learned_positions(model: Gpt2) -> None:
    if model.positions is None:
        raise ConfigError(
            "transformers' GPT2LMHeadModel has learned positions only, this model was built with model.positions: "
            "alibi; there is no checkpoint that would compute the same. Train with model.positions: learned to "
            "exchange weights with transformers"
        )


def _huggingface_config(model: Gpt2, end_of_text_id: int) -> dict[str, Any]:
    shape, dropout = model.config.shape, model.config.dropout
    return _FIXED_ARCHITECTURE | {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocabulary_size,
        "n_positions": model.max_positions,
        "n_embd": shape["hidden_size"],
        "n_layer": shape["layers"],
        "n_head": shape["heads"],
        "n_inner": None,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "initializer_range": INITIAL_DEVIATION,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "dtype": "float32",
    }


def _our_config(values: dict[str, Any], directory: Path) -> Gpt2Config:
    """The `model:` section that computes what config.json describes; dropout is the run's choice and stays 0."""
    for key, expected in _FIXED_ARCHITECTURE.items():
        if values.get(key, expected) != expected:
            raise CheckpointError(f"{directory / 'config.json'}: {key} must be {expected!r}, found {values[key]!r}")
    missing = {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head"} - values.keys()
    if missing:
        raise CheckpointError(f"{directory / 'config.json'}: {min(missing)} is missing")
    if values.get("n_inner") not in (None, 4 * values["n_embd"]):
        raise CheckpointError(
            f"{directory / 'config.json'}: n_inner must be null or {4 * values['n_embd']}, found {values['n_inner']}"
        )
    section = {
        "kind": "gpt2",
        "positions": "learned",
        "max_positions": values["n_positions"],
        "layers": values["n_layer"],
        "hidden_size": values["n_embd"],
        "heads": values["n_head"],
    }
    return validate(section, Gpt2Config, origin=str(directory / "config.json"))


def _copy_tokenizer(tokenizer_dir: Path, directory: Path) -> None:
    present = [name for name in _TOKENIZER_FILES if (tokenizer_dir / name).is_file()]
    if not present:
        raise ConfigError(f"{tokenizer_dir} holds no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    for name in present:
        shutil.copyfile(tokenizer_dir / name, directory / name)
        fsync_file(directory / name)


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
