"""Attention computed directly by its formula: dense, in FP32 or better, one mask. Slow; the oracle for all others."""

import math

import torch
import torch.nn.functional as F

from evenpack.kernels.segments import Heads, Segments, SharedHeads
from evenpack.kernels.shared import repeat_heads


def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Returns softmax(q k^T / sqrt(D) - slope |i - j|) v within each segment.

    Scores of all H x T x T pairs are held in at least float32; the output has q's dtype.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    precise = torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(q.shape[0], device=q.device)
    segment = torch.searchsorted(segments.cu_seqlens, positions, right=True)  # not by what it checks
    visible = segment[:, None] == segment[None, :]
    if segments.causal:
        visible &= positions[:, None] >= positions[None, :]
    if window is not None:
        visible &= (positions[:, None] - positions[None, :]).abs() <= window

    scores = torch.einsum("ihd,jhd->hij", q.to(precise), k.to(precise)) / math.sqrt(q.shape[2])
    if segments.alibi_slopes is not None:
        distances = (positions[:, None] - positions[None, :]).abs()
        scores = scores - segments.alibi_slopes.to(precise)[:, None, None] * distances
    probabilities = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    probabilities = F.dropout(probabilities, dropout)
    return torch.einsum("hij,jhd->ihd", probabilities, v.to(precise)).to(q.dtype)
