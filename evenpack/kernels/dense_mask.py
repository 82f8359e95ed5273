"""Attention over complete rows with a mask, as PackedBERT computes it: the scores of all pairs of a row's slots, L x L.

It costs as much for a pack as for one long sequence. That is its purpose: it is the baseline of kernels that skip what
a mask would discard, and the way of frameworks without such kernels.

Shapes: R = rows, L = slots of a row, T = R L; see `attention.py` for the others.

Source: Krell et al. 2021, Efficient Sequence Packing without Cross-contamination (arXiv:2107.02027), section 3.2.2;
appendix T.3: the mask is added to the scores, and made on the device.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from evenpack.kernels.segments import Heads, Segments, SharedHeads, segment_of_slots
from evenpack.kernels.shared import never_compiled, repeat_heads


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known:
    """What is added to the scores of a micro-batch, and what it was made for."""

    made_for: tuple[object, ...]
    alibi_slopes: Tensor | None
    mask: Float[Tensor, "R 1 L L"]
    alibi_bias: Float[Tensor, "H L L"] | None


_MASKS: MutableMapping[Tensor, dict[int | None, _Known]] = WeakIdKeyDictionary()
"""Masks by the tensor of boundaries, which all layers of a micro-batch share, and by window."""


@never_compiled  # the layers share a mask that is found by identity
def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Returns softmax(q k^T / sqrt(D) - slope |i - j| + mask) v for each row; nothing is read from the device.

    Scores of all R x H x L x L pairs exist at once, in q's dtype; their softmax is computed in FP32.

    Raises: ValueError if rows of `segments.row_slots` do not divide the slots.
    """
    slots, heads, head_dim = q.shape
    length = segments.row_slots or slots
    if slots % length:
        raise ValueError(f"{slots} slots are not whole rows of {length}; dense_mask needs rows of equal length")
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    queries, keys, values = (part.view(-1, length, heads, head_dim).transpose(1, 2) for part in (q, k, v))
    known = _known(segments, slots, length, dtype=q.dtype, window=window)
    scores = (queries / math.sqrt(head_dim)) @ keys.transpose(2, 3)
    if known.alibi_bias is not None:
        scores = scores + known.alibi_bias
    probabilities = (scores + known.mask).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    attended = F.dropout(probabilities, dropout) @ values  # [R, H, L, D]
    return attended.transpose(1, 2).reshape(slots, heads, head_dim)


def additive_mask(
    cu_seqlens: Int32[Tensor, " S_plus_1"],
    slots: int,
    row_slots: int,
    *,
    causal: bool,
    dtype: torch.dtype,
    window: int | None = None,
) -> Float[Tensor, "R 1 L L"]:
    """Returns 0 where a slot sees another one of its row, and -inf elsewhere, on the device of the boundaries."""
    positions = torch.arange(row_slots, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segments = segment_of_slots(cu_seqlens, slots).view(-1, row_slots)
    hidden = segments[:, :, None] != segments[:, None, :]
    if causal:
        hidden |= positions[:, None] < positions[None, :]
    if window is not None:
        hidden |= (positions[:, None] - positions[None, :]).abs() > window
    mask = torch.zeros(hidden.shape, device=cu_seqlens.device, dtype=dtype)
    return mask.masked_fill_(hidden, -math.inf)[:, None]


def _known(segments: Segments, slots: int, row_slots: int, *, dtype: torch.dtype, window: int | None) -> _Known:
    """Returns what is added to the scores; only another micro-batch or window needs another mask."""
    borders, causal, slopes = segments.cu_seqlens, segments.causal, segments.alibi_slopes
    version = 0 if borders.is_inference() else borders._version  # tensors of inference mode count none
    made_for = (version, slots, row_slots, causal, dtype)
    of_windows = _MASKS.setdefault(borders, {})
    known = of_windows.get(window)
    if known is None or known.made_for != made_for or known.alibi_slopes is not slopes:
        known = of_windows[window] = _Known(
            made_for=made_for,
            alibi_slopes=slopes,
            mask=additive_mask(borders, slots, row_slots, causal=causal, dtype=dtype, window=window),
            alibi_bias=None if slopes is None else _alibi_bias(slopes, row_slots, dtype),
        )
    return known


def _alibi_bias(slopes: Float[Tensor, " H"], row_slots: int, dtype: torch.dtype) -> Float[Tensor, "H L L"]:
    """Returns -slope * |i - j|; distances within a segment equal distances within its row."""
    positions = torch.arange(row_slots, device=slopes.device)
    distances = (positions[:, None] - positions[None, :]).abs()
    return (-slopes.float()[:, None, None] * distances).to(dtype)
