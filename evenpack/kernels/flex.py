"""Attention through PyTorch's FlexAttention, compiled by Triton: ALiBi, any head size and FP32, but no dropout.

A mask of blocks names the pairs of 128 x 128 slots that a segment has in common; the others are never computed. It is
made on the device, without waiting for it, and once for all layers of a micro-batch.
"""

from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from evenpack.kernels.segments import Heads, Segments, SharedHeads, segment_of_slots
from evenpack.kernels.shared import never_compiled

BLOCK = 128
"""Slots along one side of a block, in queries and in keys."""

_Key = tuple[int, int, bool]
_MASKS: MutableMapping[Tensor, dict[int | None, tuple[_Key, BlockMask]]] = WeakIdKeyDictionary()
"""Masks by the tensor of boundaries that they were made of, which all layers of a micro-batch share, and by window."""


@never_compiled  # it compiles its own kernel, and the layers share a mask that is found by identity
def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Runs FlexAttention over the segments, without dropout."""
    if dropout:
        raise ValueError("FlexAttention has no dropout; resolve_backend keeps such requests away")
    output = _kernel(is_compiled=q.device.type == "cuda")(
        *(part.transpose(0, 1)[None] for part in (q, k, v)),  # [1, H, T, D]
        score_mod=None if segments.alibi_slopes is None else _alibi(segments.alibi_slopes.float()),
        block_mask=_mask(segments.cu_seqlens, len(q), causal=segments.causal, window=window),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    if not isinstance(output, Tensor):
        raise TypeError(f"flex_attention returned {type(output).__name__}, expected a tensor")
    return output[0].transpose(0, 1)


@cache
def _kernel(*, is_compiled: bool) -> Callable[..., Any]:
    """Returns the kernel, or PyTorch's formula, which computes all scores of the pack."""
    formula: Any = flex_attention
    return torch.compile(formula) if is_compiled else formula


def _alibi(slopes: Float[Tensor, " H"]) -> Callable[..., Tensor]:
    def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key).abs()

    return biased


def _mask(cu_seqlens: Int32[Tensor, " S_plus_1"], tokens: int, *, causal: bool, window: int | None) -> BlockMask:
    """Returns the mask for these boundaries; only another micro-batch or window needs another one."""
    key = (cu_seqlens._version, tokens, causal)
    of_windows = _MASKS.setdefault(cu_seqlens, {})
    known = of_windows.get(window)
    if known is None or known[0] != key:
        known = of_windows[window] = (key, block_mask(cu_seqlens, tokens, causal=causal, window=window))
    return known[1]


def block_mask(
    cu_seqlens: Int32[Tensor, " S_plus_1"], tokens: int, *, causal: bool, window: int | None = None
) -> BlockMask:
    """Returns the mask of blocks of a pack with `tokens` slots, on the device of its boundaries."""
    segments = segment_of_slots(cu_seqlens, tokens)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = segments[query] == segments[key]
        seen = same & (query >= key) if causal else same
        return seen if window is None else seen & ((query - key).abs() <= window)

    partial, whole = visible_blocks(cu_seqlens, segments, causal=causal, window=window)
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


def visible_blocks(
    cu_seqlens: Int32[Tensor, " S_plus_1"], segments: Int64[Tensor, " T"], *, causal: bool, window: int | None = None
) -> tuple[Bool[Tensor, " B B"], Bool[Tensor, " B B"]]:
    """Returns which blocks of keys (columns) each block of queries (rows) sees in part, and which as a whole.

    The segments of a block's first and last slot bound what it sees, since segments are contiguous.
    """
    tokens = len(segments)
    blocks = torch.arange(-(-tokens // BLOCK), device=segments.device)
    first_slot, last_slot = blocks * BLOCK, (blocks * BLOCK + BLOCK - 1).clamp(max=tokens - 1)
    first_segment, last_segment = segments[first_slot], segments[last_slot]
    first_key = cu_seqlens[first_segment] // BLOCK
    last_key = blocks if causal else (cu_seqlens[last_segment + 1] - 1) // BLOCK
    seen = (first_key[:, None] <= blocks) & (blocks <= last_key[:, None])
    is_single = (first_segment == last_segment) & (first_slot + BLOCK <= tokens)
    whole = is_single[:, None] & is_single & (first_segment[:, None] == first_segment)
    if causal:
        whole &= blocks[:, None] > blocks
    if window is not None:
        distances = (blocks[:, None] - blocks).abs()
        seen &= (distances - 1) * BLOCK < window  # the nearest pair of the two blocks
        whole &= (distances + 1) * BLOCK <= window + 1  # the farthest
    return seen & ~whole, whole


def _listed(blocks: Bool[Tensor, " B B"]) -> tuple[Int32[Tensor, " 1 1 B"], Int32[Tensor, " 1 1 B B"]]:
    """Returns the number of blocks in each row, and their columns, those first."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    columns = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns[None, None]
