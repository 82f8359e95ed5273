"""Attention through PyTorch's own FlashAttention 2. CUDA only.

`torch.nn.attention.varlen` is its interface, which has no dropout. The operator below it has, and a gradient; it is
private, so a call with dropout is served only where its arguments are those that are written here. ALiBi is not served:
the operator's forward pass takes slopes and its backward pass does not, so gradients would be wrong and nobody told.

The backward pass is deterministic only under `torch.use_deterministic_algorithms(True)`.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evenpack.kernels.segments import Heads, Segments, SharedHeads
from evenpack.kernels.shared import constant_when_compiled, repeat_heads

DROPPING = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused"
    ),
}
"""The operators of `torch.ops.aten` that have dropout, and their positional arguments in torch 2.11 to 2.13."""


@cache
def dropout_failure() -> str | None:
    """Returns the reason why this PyTorch's FlashAttention cannot drop probabilities, in a line; None if it can."""
    for name, expected in DROPPING.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no operator aten.{name}"
        arguments = operator.default._schema.arguments
        found = " ".join(argument.name for argument in arguments if not argument.kwarg_only)
        if found != expected:
            return f"aten.{name} of torch {torch.__version__} takes ({found}), expected ({expected})"
    return None


def cudnn_failure() -> str | None:
    """Returns the reason why this PyTorch's varlen_attn is not FlashAttention 2, in a line; None if it is.

    Later builds prefer cuDNN, which was four times slower (torchtitan#4458, pytorch#187770) and in some of them wrong
    at unaligned strides (pytorch#194818).
    """
    from torch.nn.attention import varlen

    chooses = getattr(varlen, "_should_use_cudnn", None)
    if chooses is None or not chooses(0):  # the GPUs of a machine are of one kind
        return None
    return f"varlen_attn of torch {torch.__version__} runs cuDNN in place of FlashAttention: install torch<2.14"


@cache
def _parameters() -> frozenset[str]:
    """Returns the parameters of varlen_attn in this version of PyTorch."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@constant_when_compiled
def _takes(name: str) -> bool:
    """Returns whether varlen_attn has this parameter; compiled code asks once, when it is made."""
    return name in _parameters()


def _span_arguments(causal: bool, window: int | None) -> dict[str, Any]:
    """Returns the argument for the tokens attended to: `is_causal` in the first releases, a window later."""
    if window is None and _takes("is_causal"):
        return {"is_causal": causal}
    before = -1 if window is None else window
    return {"window_size": (before, 0 if causal else before)}


def window_failure(*, dropout: bool) -> str | None:
    """Returns the reason why this PyTorch's FlashAttention cannot compute a window, in a line; None if it can."""
    if dropout:
        return "PyTorch's varlen_attn, which has windows, has no dropout"
    return None if "window_size" in _parameters() else f"varlen_attn of torch {torch.__version__} has no window_size"


def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Runs FlashAttention 2 over the segments, without ALiBi, and without a window where it has dropout."""
    if segments.alibi_slopes is not None:
        raise ValueError("varlen has no ALiBi; resolve_backend keeps such requests away")
    borders, longest = segments.cu_seqlens, segments.max_sequence_length
    if dropout > 0:
        if window is not None:
            raise ValueError("varlen has no dropout in a window; resolve_backend keeps such requests away")
        dropped: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, borders, borders, longest, longest, dropout, segments.causal, False
        )[0]
        return dropped
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if _takes("enable_gqa"):
            grouped = {"enable_gqa": True}
        else:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    span = _span_arguments(segments.causal, window)
    output = varlen_attn(q, k, v, borders, borders, longest, longest, **span, **grouped)
    if not isinstance(output, Tensor):
        raise TypeError(f"varlen_attn returned {type(output).__name__}, expected a tensor")
    return output
