"""Attention through `torch.nn.attention.varlen`, PyTorch's own FlashAttention 2. CUDA only.

It has neither ALiBi nor dropout, and its backward is deterministic only under
`torch.use_deterministic_algorithms(True)`.
"""

import inspect
from functools import cache
from typing import Any

from jaxtyping import Float, Int32
from torch import Tensor

from evenpack.kernels.compiling import constant_when_compiled
from evenpack.kernels.grouped_heads import repeat_heads


@cache
def _parameters() -> frozenset[str]:
    """Returns the parameters of varlen_attn in this version of PyTorch."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@constant_when_compiled
def _takes(name: str) -> bool:
    """Returns whether varlen_attn has this parameter; compiled code asks once, when it is made."""
    return name in _parameters()


def _causal_arguments(causal: bool) -> dict[str, Any]:
    """Returns the argument that makes attention causal: `is_causal` in the first releases, a window in later ones."""
    if _takes("is_causal"):
        return {"is_causal": causal}
    return {"window_size": (-1, 0) if causal else (-1, -1)}


def attend(
    q: Float[Tensor, " T H D"],
    k: Float[Tensor, " T G D"],
    v: Float[Tensor, " T G D"],
    cu_seqlens: Int32[Tensor, " S_plus_1"],
    max_sequence_length: int,
    *,
    causal: bool,
    alibi_slopes: Float[Tensor, " H"] | None,
    dropout: float,
) -> Float[Tensor, " T H D"]:
    """Runs FlashAttention 2 over the segments, without ALiBi and dropout."""
    from torch.nn.attention.varlen import varlen_attn

    if alibi_slopes is not None or dropout:
        raise ValueError("varlen has neither ALiBi nor dropout; resolve_backend keeps such requests away")
    grouped: dict[str, Any] = {}
    if k.shape[1] != q.shape[1]:
        if _takes("enable_gqa"):
            grouped = {"enable_gqa": True}
        else:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    output = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_sequence_length,
        max_sequence_length,
        **_causal_arguments(causal),
        **grouped,
    )
    if not isinstance(output, Tensor):
        raise TypeError(f"varlen_attn returned {type(output).__name__}, expected a tensor")
    return output
