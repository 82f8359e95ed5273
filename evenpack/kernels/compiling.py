"""Marks for torch.compile that cost nothing where nothing is compiled.

Those of `torch.compiler` import torch._dynamo where they are written, which takes a second of every command and process
that imports a kernel. torch marks its own functions like this.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def never_compiled(function: FunctionT) -> FunctionT:
    """Marks a function that runs uncompiled, with all that it calls, as `torch.compiler.disable` does."""
    marked: FunctionT = getattr(torch, "_disable_dynamo")(function)  # noqa: B009 - it is not exported to type checkers
    return marked


def constant_when_compiled(function: FunctionT) -> FunctionT:
    """Marks a function whose result compiled code takes once, as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
