"""Attention computed directly by its formula: dense, in FP32 or better, one mask. Slow; the oracle for all others."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from evenpack.kernels.shared import repeat_heads


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
    window: int | None = None,
) -> Float[Tensor, " T H D"]:
    """Returns softmax(q k^T / sqrt(D) - slope |i - j|) v within each segment.

    Scores of all H x T x T pairs are held in at least float32; the output has q's dtype. `max_sequence_length` is
    not needed.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    precise = torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(q.shape[0], device=q.device)
    segments = torch.searchsorted(cu_seqlens, positions, right=True)  # not shared with the kernels that it checks
    visible = segments[:, None] == segments[None, :]
    if causal:
        visible &= positions[:, None] >= positions[None, :]
    if window is not None:
        visible &= (positions[:, None] - positions[None, :]).abs() <= window

    scores = torch.einsum("ihd,jhd->hij", q.to(precise), k.to(precise)) / math.sqrt(q.shape[2])
    if alibi_slopes is not None:
        distances = (positions[:, None] - positions[None, :]).abs()
        scores = scores - alibi_slopes.to(precise)[:, None, None] * distances
    probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    probabilities = F.dropout(probabilities, dropout)
    return torch.einsum("hij,jhd->ihd", probabilities, v.to(precise)).to(q.dtype)
