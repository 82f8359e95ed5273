"""Attention through FlashAttention 4 (the package flash-attn-4): Hopper and Blackwell, no dropout, taken by name only.

Its own interface is an `autograd.Function`, opaque to torch.compile, with three gradients. Below it are two functions
that fill what they are given. Here they are an operator and its gradient, which stay in compiled graphs. They take
queries, keys and values as three tensors, or as the one that a linear layer has computed, whose gradient is then one
tensor too, so that nothing is concatenated.

Of the package's windows both ends count: a query sees keys from `window_size_left` before it to `window_size_right`
after it, itself included (`mask.py`, `AttentionMask.apply_mask`); None: as far as the segment reaches.

Shapes: T = slots, H = heads, G = key/value heads, D = head_dim, S = segments.
"""

import importlib
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evenpack.kernels.segments import Heads, Segments, SharedHeads

PACKAGE = "flash-attn-4"

MODULE = "flash_attn.cute.interface"

_BOTH = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal window_size_left window_size_right"

ARGUMENTS = {
    "_flash_attn_fwd": f"q k v {_BOTH} return_lse",
    "_flash_attn_bwd": f"q k v out dout lse {_BOTH} deterministic dq dk dv",
}
"""The functions that are called, which the package calls private, and the arguments that they are given, by name."""


@cache
def import_failure() -> str | None:
    """Returns the reason why FlashAttention 4 cannot be used here, in a line; None if it can."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("flash_attn"):
            return f"{PACKAGE} is not installed: pip install 'evenpack[flash4]'"
        return f"{PACKAGE} is installed but needs the missing module '{error.name}'"
    except Exception as error:  # whatever a broken binary raises
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{PACKAGE} is installed but cannot be imported: {message}"
    for name, arguments in ARGUMENTS.items():
        function = getattr(module, name, None)
        missing = set(arguments.split()) - set(inspect.signature(function).parameters if function else ())
        if missing:
            return f"{MODULE}.{name} of this {PACKAGE} does not take {', '.join(sorted(missing))}: see constraints.txt"
    return None


def attend(
    q: Heads,
    k: SharedHeads,
    v: SharedHeads,
    segments: Segments,
    *,
    dropout: float = 0.0,
    window: int | None = None,
    merged: Float[Tensor, " T H_plus_2_G D"] | None = None,
) -> Heads:
    """Runs FlashAttention 4 over the segments, without ALiBi and dropout.

    Args:
        merged: q, k and v side by side, if they are parts of one tensor: it alone is then read and has a gradient.
    """
    if segments.alibi_slopes is not None or dropout > 0:
        raise ValueError("FlashAttention 4 has neither ALiBi nor dropout; resolve_backend keeps such requests away")
    inputs = [q, k, v] if merged is None else [merged]
    output: Tensor = flash_attention_4(
        inputs,
        segments.cu_seqlens,
        heads=q.shape[1],
        max_sequence_length=segments.max_sequence_length,
        causal=segments.causal,
        window=window,
    )[0]
    return output


def compute(
    inputs: Sequence[Tensor],
    cu_seqlens: Tensor,
    *,
    heads: int,
    max_sequence_length: int,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and the logarithms of the sums of each head and slot in FP32.

    Args:
        inputs: q, k and v; or one tensor [T, H + 2 G, D].
        heads: H.
    """
    forward = importlib.import_module(MODULE)._flash_attn_fwd
    settings = _settings(cu_seqlens, max_sequence_length, causal, window)
    output, logarithms, *_ = forward(*_parts(inputs, heads), return_lse=True, **settings)
    return output, logarithms


def differentiate(
    gradient: Tensor,
    inputs: Sequence[Tensor],
    output: Tensor,
    logarithms: Tensor,
    cu_seqlens: Tensor,
    *,
    heads: int,
    max_sequence_length: int,
    causal: bool,
    window: int | None,
) -> list[Tensor]:
    """Returns the gradient of each tensor of `inputs`; deterministic if PyTorch is told to be."""
    backward = importlib.import_module(MODULE)._flash_attn_bwd
    gradients = _room_for_gradients(inputs)
    dq, dk, dv = _parts(gradients, heads)
    backward(
        *_parts(inputs, heads),
        output,
        gradient,
        logarithms,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dq=dq,
        dk=dk,
        dv=dv,
        **_settings(cu_seqlens, max_sequence_length, causal, window),
    )
    return gradients


def _parts(inputs: Sequence[Tensor], heads: int) -> Sequence[Tensor]:
    """Returns q, k and v, as views if they are one tensor."""
    if len(inputs) == 3:
        return inputs
    shared = (inputs[0].shape[1] - heads) // 2
    return inputs[0].split_with_sizes([heads, shared, shared], dim=1)


def _room_for_gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in inputs]


def _settings(cu_seqlens: Tensor, max_sequence_length: int, causal: bool, window: int | None) -> dict[str, Any]:
    """Returns the arguments of both directions."""
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_sequence_length,
        "max_seqlen_k": max_sequence_length,
        "causal": causal,
        "window_size_left": window,
        "window_size_right": 0 if window is not None and causal else window,
    }


flash_attention_4 = torch.library.custom_op("evenpack::flash_attention_4", compute, mutates_args=())
_backward = torch.library.custom_op("evenpack::flash_attention_4_backward", differentiate, mutates_args=())


@flash_attention_4.register_fake
def _shapes(inputs: Sequence[Tensor], cu_seqlens: Tensor, *, heads: int, **_: Any) -> tuple[Tensor, Tensor]:
    q = _parts(inputs, heads)[0]
    return q.new_empty(q.shape), q.new_empty((heads, q.shape[0]), dtype=torch.float32)


@_backward.register_fake
def _gradient_shapes(gradient: Tensor, inputs: Sequence[Tensor], *_: Any, **__: Any) -> list[Tensor]:
    return _room_for_gradients(inputs)


def _keep(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    tensors, cu_seqlens = inputs
    ctx.settings = keyword_only_inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # none for the logarithms


def _differentiated(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *tensors, output, logarithms, cu_seqlens = ctx.saved_tensors
    return _backward(gradient, tensors, output, logarithms, cu_seqlens, **ctx.settings), None


flash_attention_4.register_autograd(_differentiated, setup_context=_keep)
