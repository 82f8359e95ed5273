"""What several backends use: heads of keys and values repeated for their queries, and marks for torch.compile.

The marks cost nothing where nothing is compiled. Those of `torch.compiler` import torch._dynamo where they are written,
which takes a second of every command and process that imports a kernel. torch marks its own functions like this.

Shapes: T = slots, H = query heads, G = key/value heads, D = head_dim; G divides H.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def repeat_heads(keys_or_values: Float[Tensor, " T G D"], query_heads: int) -> Float[Tensor, " T H D"]:
    """Returns each key/value head repeated for the query heads that share it; no copy if they are as many.

    Source: Ainslie et al. 2023, GQA: Training Generalized Multi-Query Transformer Models, section 2.2
    (arXiv:2305.13245).
    """
    group = query_heads // keys_or_values.shape[1]
    return keys_or_values if group == 1 else keys_or_values.repeat_interleave(group, dim=1)


def never_compiled(function: FunctionT) -> FunctionT:
    """Marks a function that runs uncompiled, with all that it calls, as `torch.compiler.disable` does."""
    marked: FunctionT = getattr(torch, "_disable_dynamo")(function)  # noqa: B009 - it is not exported to type checkers
    return marked


def constant_when_compiled(function: FunctionT) -> FunctionT:
    """Marks a function whose result compiled code takes once, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
