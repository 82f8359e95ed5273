"""The segments of a micro-batch, as every attention backend takes them.

Shapes: T = slots, H = query heads, G = key/value heads, D = head_dim, S = segments; G divides H.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from evenpack.batch import PackedBatch

Heads = Float[Tensor, " T H D"]
"""Queries, and the result of attention."""

SharedHeads = Float[Tensor, " T G D"]
"""Keys or values, of as many heads as queries or fewer."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Says where segments begin and end, and what a slot sees of its own; it sees nothing of another."""

    cu_seqlens: Int[Tensor, " S_plus_1"]
    """Boundaries, int32, from 0 to T, ascending. Repeated values are empty segments."""
    max_sequence_length: int
    """Upper bound of a segment's length; a fixed number keeps kernel launches the same."""
    causal: bool
    """Whether position i sees j <= i only."""
    alibi_slopes: Float[Tensor, " H"] | None = None
    """One per head; -slope * |i - j| is added to the scores (Press et al. 2022, arXiv:2108.12409)."""

    @classmethod
    def of_batch(
        cls, batch: PackedBatch, *, causal: bool, alibi_slopes: Float[Tensor, " H"] | None = None
    ) -> "Segments":
        """Returns the segments of a micro-batch."""
        return cls(
            cu_seqlens=batch.cu_seqlens,
            max_sequence_length=batch.max_sequence_length,
            causal=causal,
            alibi_slopes=alibi_slopes,
        )


def segment_of_slots(cu_seqlens: Int32[Tensor, " S_plus_1"], tokens: int) -> Int64[Tensor, " T"]:
    """Returns the segment of each slot; empty segments have none."""
    slots = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], slots, right=True)
