"""What several backends use: repeated heads of keys and values, and marks for torch.

The marks cost nothing where nothing is compiled. Those of `torch.compiler` import torch._dynamo where they are written,
which takes a second of every command and process that imports a kernel. torch marks its own functions like this.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import wrap_torch_function

from evenpack.kernels.segments import Heads, SharedHeads

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def repeat_heads(keys_or_values: SharedHeads, query_heads: int) -> Heads:
    """Returns each key/value head repeated for the query heads that share it; no copy if they are as many.

    Source: Ainslie et al. 2023, GQA: Training Generalized Multi-Query Transformer Models, section 2.2
    (arXiv:2305.13245).
    """
    group = query_heads // keys_or_values.shape[1]
    return keys_or_values if group == 1 else keys_or_values.repeat_interleave(group, dim=1)


def never_compiled(function: FunctionT) -> FunctionT:
    """Marks a function that runs uncompiled, with all that it calls, as `torch.compiler.disable` does."""
    return getattr(torch, "_disable_dynamo")(function)  # noqa: B009 - it is not exported to type checkers


def constant_when_compiled(function: FunctionT) -> FunctionT:
    """Marks a function whose result compiled code takes once, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def one_operator(function: FunctionT) -> FunctionT:
    """Lets a mode of torch's functions take a call as a whole, by its first tensor: `models/trace.py` counts it so."""
    wrap: Any = wrap_torch_function(lambda tensor, *_, **__: (tensor,))
    return wrap(function)
