"""FlashAttention as operators of fake tensors: what its kernels ask of their arguments, and what they compute.

Two packages bring version 2. Torch's `varlen_attn`, and the operator with dropout below it, have fake implementations
that check nothing. flash-attn cannot be installed without a GPU, so its operators and its one function that we call are
declared here, with the names, arguments and results of versions 2.8.3 to 2.8.4 (`flash_attn/flash_attn_interface.py`).
What both kernels refuse is in `csrc/flash_attn/flash_api.cpp`, `mha_varlen_fwd`.

Of FlashAttention 4 the operators are ours, and its package is a module whose functions take the right arguments.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evenpack.kernels import flash4
from fake_gpu import flex_operator

FORWARD = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
"""Schemas as flash-attn declares them."""
BACKWARD = (
    "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
    "bool zero_tensors=False) -> Tensor"
)

_HEAD_MULTIPLE = 8
_WIDEST_HEAD = 256

OPERATORS = {
    "torch_attn::_varlen_attn": ("query", "key", "value", "cu_seq_q", "cu_seq_k"),
    "torch_attn::_varlen_attn_backward": ("query", "key", "value", "cu_seq_q", "cu_seq_k"),
    "aten::_flash_attention_forward": ("query", "key", "value", "cum_seq_q", "cum_seq_k"),
    "aten::_flash_attention_backward": ("query", "key", "value", "cum_seq_q", "cum_seq_k"),
    "flash_attn::_flash_attn_varlen_forward": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "flash_attn::_flash_attn_varlen_backward": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "evenpack::flash_attention_4": ("inputs", "cu_seqlens", "cu_seqlens"),
    "evenpack::flash_attention_4_backward": ("inputs", "cu_seqlens", "cu_seqlens"),
    flex_operator.FORWARD: ("q", "k", "v", "segments", "segments"),
    flex_operator.BACKWARD: ("q", "k", "v", "segments", "segments"),
}
"""Operators of attention over segments, and their names for queries, keys, values and both boundaries, in place of
which FlexAttention has the segment of each slot. FlashAttention 4 takes the first three in a list, or as one tensor."""


def tensors_of(name: str, given: Mapping[str, Any]) -> list[Tensor]:
    """Returns queries, keys, values and both boundaries of a call, by the arguments that it was given."""
    first, *others = (given[argument] for argument in OPERATORS[name])
    parts = flash4._parts(first, given["heads"]) if isinstance(first, list) else [first]
    return [*parts, *others]


_libraries: list[Any] = []


def provide_flash_attn() -> None:
    """Makes `import flash_attn` bring a module whose attention takes fake tensors; a second call does nothing."""
    if _libraries:
        return
    new_library: Any = torch.library.Library  # has no annotations
    library = new_library("flash_attn", "DEF")
    library.define(FORWARD)
    library.define(BACKWARD)
    library.impl("_flash_attn_varlen_forward", _forward_shapes, "Meta")
    library.impl("_flash_attn_varlen_backward", _backward_shapes, "Meta")
    _libraries.append(library)
    module: Any = ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = flash_attn_varlen_func
    sys.modules["flash_attn"] = module
    fourth = ModuleType(flash4.MODULE)
    for name, arguments in flash4.ARGUMENTS.items():
        setattr(fourth, name, _never_called(arguments.split()))
    sys.modules[flash4.MODULE] = fourth


def _never_called(arguments: Sequence[str]) -> Any:
    def kernel(*_: Any, **__: Any) -> Any:
        raise AssertionError("FlashAttention 4 was called, though nothing on a fake device is")

    parameters = [inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY) for argument in arguments]
    kernel.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return kernel


def flash_attn_varlen_func(  # noqa: PLR0917 - as published
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Calls the operators as the published function does; pages and returned probabilities are left out."""
    if return_attn_probs or block_table is not None:
        raise NotImplementedError("the stand-in has no probabilities and no pages: evenpack asks for neither")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    settings = (max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, *window_size, softcap)
    output: Tensor = _FlashAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, settings, deterministic
    )
    return output


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd's functions take no names
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        alibi_slopes: Tensor | None,
        settings: tuple[Any, ...],
        deterministic: bool,
    ) -> Tensor:
        head_dim = q.shape[2]
        q, k, v = (_with_whole_heads(tensor) for tensor in (q, k, v))
        output, logarithms, _, random_state = torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, *settings, alibi_slopes
        )
        ctx.save_for_backward(q, k, v, output, logarithms, cu_seqlens_q, cu_seqlens_k, random_state)
        ctx.alibi_slopes, ctx.settings, ctx.deterministic = alibi_slopes, settings, deterministic
        result: Tensor = output[..., :head_dim]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logarithms, cu_seqlens_q, cu_seqlens_k, random_state = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        torch.ops.flash_attn._flash_attn_varlen_backward(
            _with_whole_heads(gradient),
            q,
            k,
            v,
            output,
            logarithms,
            *gradients,
            cu_seqlens_q,
            cu_seqlens_k,
            *ctx.settings,
            ctx.alibi_slopes,
            ctx.deterministic,
            random_state,
        )
        head_dim = gradient.shape[2]
        return (*(tensor[..., :head_dim] for tensor in gradients), None, None, None, None, None)


def broken_contract(
    operator: Any, arguments: Sequence[Any], named: Mapping[str, Any], dtype: torch.dtype
) -> str | None:
    """Returns what FlashAttention 2 would refuse in a call of one of its operators; None for a sound call or another.

    Args:
        dtype: dtype of queries, keys and values under the run's precision.
    """
    name = operator.name().partition(".")[0]
    if name not in OPERATORS:
        return None
    given = by_name(operator, arguments, named)
    tensors = tensors_of(name, given)
    if name in (flex_operator.FORWARD, flex_operator.BACKWARD):
        found = {tensor.dtype for tensor in tensors[:3]}
        return None if found == {dtype} else f"q, k and v must be {dtype}"
    tensors, borders = tensors[:3], tensors[3:]
    q, k, v = tensors
    checks = {
        f"q, k and v must be {dtype}, one of the kernel's types": (
            dtype in (torch.float16, torch.bfloat16) and all(tensor.dtype == dtype for tensor in tensors)
        ),
        "q, k, v and the boundaries must be on the device": all(tensor.is_cuda for tensor in (*tensors, *borders)),
        "boundaries must be contiguous int32": all(
            border.dtype == torch.int32 and border.is_contiguous() for border in borders
        ),
        "channels of a head must lie side by side": all(tensor.stride(2) == 1 for tensor in tensors),
        f"heads must be multiples of {_HEAD_MULTIPLE} wide, at most {_WIDEST_HEAD}": (
            q.shape[2] % _HEAD_MULTIPLE == 0 and q.shape[2] <= _WIDEST_HEAD
        ),
        "k and v must have equal heads, which divide those of q": k.shape == v.shape and q.shape[1] % k.shape[1] == 0,
        "alibi_slopes must be float32, one for each head": _are_slopes(given.get("alibi_slopes"), heads=q.shape[1]),
    }
    broken = [rule for rule, is_kept in checks.items() if not is_kept]
    return "; ".join(broken) or None


def by_name(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names that the operator's schema gives them."""
    names = [argument.name for argument in operator._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in operator._schema.arguments}
    return defaults | dict(zip(names, arguments, strict=False)) | dict(named)


def _are_slopes(slopes: Tensor | None, *, heads: int) -> bool:
    return slopes is None or (slopes.is_cuda and slopes.dtype == torch.float32 and slopes.shape[-1] == heads)


def _with_whole_heads(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[2] % _HEAD_MULTIPLE
    return F.pad(tensor, [0, missing]) if missing else tensor


def _forward_shapes(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots, heads = q.shape[:2]
    logarithms = q.new_empty((heads, slots), dtype=torch.float32)
    return torch.empty_like(q), logarithms, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _backward_shapes(*arguments: Any, **_: Any) -> Tensor:
    q, cu_seqlens = arguments[1], arguments[9]
    slots, heads = q.shape[:2]
    rows: Tensor = q.new_empty((heads, slots + 128 * (cu_seqlens.shape[0] - 1)), dtype=torch.float32)
    return rows
