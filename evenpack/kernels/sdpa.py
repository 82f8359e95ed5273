"""Attention through `F.scaled_dot_product_attention`: every device, every dtype, ALiBi and dropout.

The segments are taken in *groups*, one call each: a long segment is a group of its own and needs no mask, short
neighbours share one whose block mask keeps them apart. A call has a fixed overhead and a masked group computes scores
that it discards; `GROUP_TOKENS` is the best trade-off of the two.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evenpack.kernels.segments import Heads, Segments, SharedHeads
from evenpack.kernels.shared import never_compiled, repeat_heads

GROUP_TOKENS = 64
"""Neighbours share a group while they hold at most this many tokens together.

Forward and backward in ms, causal FP32, head_dim 64, four packs of 1024 slots cut at random into 10 or 80 documents,
on two cores of an AMD EPYC with AVX-512, PyTorch 2.13, medians of 9. A group of 0 is one call per document, one of 1024
a block mask over each pack:

    threads  heads  documents     0     64    128    256   1024
       1       2     4 x 10     21.1   19.8   19.7   23.2   87.6
       1       2     4 x 80     24.6   13.8   15.1   23.5   86.2
       1      12     4 x 10    107.0  116.2  121.4  148.3  523.3
       1      12     4 x 80     64.1   59.5   77.2  134.1  490.3
       2       2     4 x 10     15.5   14.9   15.1   16.4   48.9
       2       2     4 x 80     31.2   14.7   13.3   15.9   48.3
       2      12     4 x 10     73.4   81.0   79.2   91.6  268.5
       2      12     4 x 80     67.8   60.0   71.6   96.4  268.5

Repeated, the 12-head rows of 4 x 10 differ by up to a tenth from run to run; groups of 64 are within that difference of
the best.
"""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Whole neighbouring segments that one call computes."""

    tokens: int
    mask: Tensor | None
    """[tokens, tokens], true where visible, or with ALiBi [1, H, tokens, tokens], to be added to the scores.
    None: a segment by itself, whose causality is the kernel's own."""


@never_compiled  # its calls depend on lengths, which are other numbers in each batch
def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Computes SDPA group by group.

    Lengths and slopes are read on the host, which synchronises with a CUDA device in every call.
    """
    if q.device.type != "cpu":  # CUDA's only fused kernel for FP32 and masks takes no groups; CPU kernels do
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    groups = plan_groups(
        tuple(segments.cu_seqlens.diff().tolist()),
        group_tokens=GROUP_TOKENS,
        causal=segments.causal,
        slopes=None if segments.alibi_slopes is None else tuple(segments.alibi_slopes.tolist()),
        # On CPU the kernels take FP32 masks with any q. On CUDA cuDNN would read one as if it had q's dtype:
        # https://github.com/pytorch/pytorch/pull/191612
        mask_dtype=torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype,
        device=q.device,
        window=window,
    )
    return attend_groups(q, k, v, groups, causal=segments.causal, dropout=dropout)


def attend_groups(
    q: Heads, k: SharedHeads, v: SharedHeads, groups: tuple[Group, ...], *, causal: bool, dropout: float
) -> Heads:
    """Returns the outputs of one SDPA call per group, concatenated."""
    sizes = [group.tokens for group in groups]
    outputs = []
    with _kernels(q.device.type):
        # split and not slices: the backward of a slice fills a whole [T, H, D] with zeros, for every group again
        for group, *parts in zip(groups, *(t.split_with_sizes(sizes) for t in (q, k, v)), strict=True):
            group_q, group_k, group_v = (part.transpose(0, 1)[None] for part in parts)  # [1, H, tokens, D]
            output = F.scaled_dot_product_attention(
                group_q,
                group_k,
                group_v,
                attn_mask=group.mask,
                dropout_p=dropout,
                is_causal=causal and group.mask is None,
                enable_gqa=k.shape[1] != q.shape[1],
            )
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _kernels(device_type: str) -> AbstractContextManager[None]:
    """Leaves cuDNN's kernel out on CUDA: it makes a plan for each length that it has not seen."""
    if device_type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels: AbstractContextManager[None] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return kernels


@lru_cache(maxsize=2)  # the layers of a batch share its masks; one more batch for a recomputed or second model
def plan_groups(
    lengths: tuple[int, ...],
    *,
    group_tokens: int,
    causal: bool,
    slopes: tuple[float, ...] | None,
    mask_dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> tuple[Group, ...]:
    """Puts neighbouring segments into groups, with their masks.

    With ALiBi the masks hold H x (longest² + T x group_tokens) numbers: segments alone in their group share one bias.
    """
    groups = _group([length for length in lengths if length], group_tokens)
    longest = max((sum(group) for group in groups), default=0)
    bias = None if slopes is None else _alibi_bias(longest, slopes, causal=causal, dtype=mask_dtype, device=device)
    return tuple(Group(tokens=sum(group), mask=_group_mask(group, bias, causal, device, window)) for group in groups)


def _group(lengths: list[int], group_tokens: int) -> list[list[int]]:
    """Cuts the row of segments into groups, each filled as far as possible."""
    groups: list[list[int]] = []
    filled = 0
    for length in lengths:
        if groups and filled + length <= group_tokens:
            groups[-1].append(length)
            filled += length
        else:
            groups.append([length])
            filled = length
    return groups


def _group_mask(
    group: list[int], bias: Tensor | None, causal: bool, device: torch.device, window: int | None
) -> Tensor | None:
    """Returns the mask of one group; a distance within a segment is one within the group, so groups share `bias`."""
    tokens = sum(group)
    is_narrow = window is not None and window < tokens - 1
    if len(group) == 1 and not is_narrow:
        return None if bias is None else bias[..., :tokens, :tokens]
    segments = torch.arange(len(group)).repeat_interleave(torch.tensor(group)).to(device)
    visible = segments[:, None] == segments[None, :]
    if causal:
        visible = visible.tril()
    if window is not None:
        visible = visible.triu(-window).tril(window)
    return visible if bias is None else bias[..., :tokens, :tokens].masked_fill(~visible, -math.inf)


def _alibi_bias(
    tokens: int, slopes: tuple[float, ...], *, causal: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, " 1 H rows rows"]:
    """Returns -slope * |i - j|, and -inf where causality forbids it; at least `tokens` rows."""
    rows = -(-tokens // 16) * 16  # rows of whole 16s keep the groups' views aligned for CUDA's kernels
    positions = torch.arange(rows, device=device)
    distances = positions[:, None] - positions[None, :]
    bias = -torch.tensor(slopes, device=device)[:, None, None] * distances.abs()
    if causal:
        bias = bias.masked_fill(distances < 0, -math.inf)
    return bias[None].to(dtype)
