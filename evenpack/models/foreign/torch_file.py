"""Files of `torch.save` that hold a model's state dict, as NVIDIA's code for BERT and many others write them.

{"model": {name: tensor}, "optimizer": ..., "epoch": ...}    or    {name: tensor}
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenpack.errors import CheckpointError

SUFFIXES = (".pt", ".pth", ".bin")

_MODEL = "model"
_WRAPPER = "module."
"""Prefix that DistributedDataParallel adds to each name."""


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """A model's tensors, and the other keys of the file."""

    tensors: dict[str, Tensor]
    beside: tuple[str, ...]


def read_state_dict(path: Path) -> StateDict:
    """Returns the tensors on the CPU, memory-mapped where the file's format allows it (all since torch 1.6).

    No code in the file is run: it may hold tensors, numbers, texts, lists and dicts, and nothing else.

    Raises: CheckpointError if it holds something else, is damaged, or has no state dict.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} must hold a dict, found {type(content).__name__}: save the model's state_dict()")
    is_wrapped = isinstance(content.get(_MODEL), Mapping)
    tensors: dict[str, Any] = dict(content[_MODEL] if is_wrapped else content)
    others = [f"{name} ({type(value).__name__})" for name, value in tensors.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        raise CheckpointError(
            f"{path} must hold tensors by name, or have them under the key '{_MODEL}'; found "
            f"{', '.join(others[:8]) or 'nothing'}: save the model's state_dict() so"
        )
    is_parallel = all(name.startswith(_WRAPPER) for name in tensors)
    named = {name.removeprefix(_WRAPPER) if is_parallel else name: tensor for name, tensor in tensors.items()}
    return StateDict(tensors=named, beside=tuple(key for key in content if key != _MODEL) if is_wrapped else ())


def _load(path: Path) -> Any:
    try:
        is_zip = zipfile.is_zipfile(path)
        damaged = _find_damaged(path) if is_zip else None
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it is wrong; copy the file again")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors and plain values; nothing else is read, because no code in a file "
            f"is run; it may also be cut off: {error}"
        ) from error


def _find_damaged(path: Path) -> str | None:
    """Returns the first damaged member of the archive; torch itself does not compare checksums."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()
