"""Reads DeepSpeed's files so that no code in them is run.

A pickle can call any function when it is read, and the checksums of a checkpoint do not prove who wrote them.
DeepSpeed reads its own files by `torch.load(weights_only=False)`, which lets a pickle do so. Here DeepSpeed is
restricted to torch's safe reader: it makes tensors, numbers and text, and the few classes of DeepSpeed that version
0.19 stores from ZeRO 1 on (none at ZeRO 0).
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.serialization import safe_globals

from evenpack.engine.world.distributed import quiet_deepspeed

ALLOWED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""Classes that DeepSpeed stores besides tensors and plain values: they hold numbers, and making one does nothing
else."""

_FORCE, _FORCE_OFF = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables of torch that override the arguments of callers of `torch.load`."""


@contextmanager
def forbidding_code(classes: Iterable[str]) -> Iterator[None]:
    """Restricts every `torch.load` within the block to plain values and these classes.

    It raises pickle.UnpicklingError for anything else.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_OFF)}
    os.environ[_FORCE] = "1"
    try:
        with safe_globals([_import(name) for name in sorted(classes)]):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _import(name: str) -> Any:
    """Imports a class of DeepSpeed, which prints to standard output unless it is told not to before."""
    quiet_deepspeed()
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
