"""FlexAttention as one operator of fake tensors.

`torch.compile` makes its kernel for the device, and there is none to make it for. The mask is built by
`kernels/flex.py` as on a GPU and watched like all else; only the kernel is a stand-in, which keeps what FlexAttention
keeps. Its numbers are tested on the CPU.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evenpack.kernels import capabilities, flex

FORWARD = "evenpack_fake::flex_forward"
BACKWARD = "evenpack_fake::flex_backward"

_SCHEMAS = {
    FORWARD: (
        "(Tensor q, Tensor k, Tensor v, Tensor[] blocks, Tensor segments, bool causal, int? window) -> (Tensor, Tensor)"
    ),
    BACKWARD: (
        "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor output, Tensor logarithms, Tensor[] blocks, "
        "Tensor segments, bool causal, int? window) -> (Tensor, Tensor, Tensor)"
    ),
}

_libraries: list[Any] = []


def provide_flex_attention() -> None:
    """Lets the backend `flex` take fake tensors; a second call does nothing."""
    if _libraries:
        return
    new_library: Any = torch.library.Library  # has no annotations
    library = new_library("evenpack_fake", "DEF")
    for (name, schema), shapes in zip(_SCHEMAS.items(), (_forward_shapes, _backward_shapes), strict=True):
        operator = name.partition("::")[2]
        library.define(operator + schema)
        library.impl(operator, shapes, "Meta")
    _libraries.append(library)
    flex._kernel = _kernel  # type: ignore[assignment]
    capabilities.has_triton = lambda: True  # it would compile the kernel


def _kernel(*, is_compiled: bool) -> Callable[..., Tensor]:
    assert is_compiled, "fake tensors are on the device"
    return _attention


def _attention(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, enable_gqa: bool) -> Tensor:
    if not enable_gqa and k.shape[1] != q.shape[1]:
        raise ValueError(f"enable_gqa must be set for {k.shape[1]} heads of keys and {q.shape[1]} of queries")
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    blocks = [getattr(block_mask, name) for name in names]
    seen = inspect.getclosurevars(block_mask.mask_mod).nonlocals
    mask = seen["segments"], seen["causal"], seen["window"]
    output: Tensor = _Flex.apply(q, k, v, blocks, *mask)  # type: ignore[no-untyped-call]
    return output


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd's functions take no names
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: list[Tensor],
        segments: Tensor,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        output: Tensor
        output, logarithms = torch.ops.evenpack_fake.flex_forward(q, k, v, blocks, segments, causal, window)
        ctx.save_for_backward(q, k, v, output, logarithms)
        ctx.mask = blocks, segments, causal, window
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.evenpack_fake.flex_backward(gradient, *ctx.saved_tensors, *ctx.mask)
        return (*gradients, None, None, None, None)


def _forward_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_shapes(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
