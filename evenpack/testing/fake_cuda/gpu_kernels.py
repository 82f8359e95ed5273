"""Operators for which a GPU has one kernel, and PyTorch's CPU build computes several: RMSNorm, and SiLU's gradient.

With a kernel of their own they are traced as on a GPU, where they keep and hold less. Under a fake mode the kernels are
never called: they only make PyTorch take the operators as they are.
"""

from collections.abc import Callable
from typing import Any

import torch

_KERNELS = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")

_library: list[Any] = []
"""PyTorch forgets kernels with the library that holds them."""


def provide_gpu_kernels() -> None:
    """Registers the kernels, once in a process."""
    if _library:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _KERNELS:
        library.impl(name, _never_called(name), "CUDA")
    _library.append(library)


def _never_called(name: str) -> Callable[..., Any]:
    def kernel(*_: Any) -> Any:
        raise AssertionError(f"{name} was computed, though nothing on a fake device is")

    return kernel
