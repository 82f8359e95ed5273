"""The isolation probe: changes inside one segment must not affect any other segment.

One segment after another gets new q, k and v, eight times as large so that a single leaked position is visible. Then
the outputs of all other segments, and the gradients of a loss over these outputs, must be unchanged, and the replaced
segment's own gradients must be zero. The same probe with isolation off (one segment over everything) is the control:
where it finds no leak, the probe has proved nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from evenpack.kernels.attention import packed_attention
from evenpack.kernels.segments import Segments

_SEGMENT_LENGTHS = (37, 1, 0, 130, 5, 64, 11, 0, 0, 0)
"""Long and short neighbours, a single token, empty segments in the middle and at the end."""

_HEADS = 2
_REPLACED_SCALE = 8.0
_TOLERATED_EPSILONS = 4.0
"""Tolerance in epsilons of the dtype: isolated kernels agree bit for bit, unless they sum gradients in any order."""

Verdict = Literal["isolated", "leaks", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class IsolationResult:
    """The result of the probe; deviations are relative to the largest value of the tensor that deviates."""

    max_deviation: float
    """Largest change, with isolation, of any output or gradient that should not have changed."""
    control_deviation: float
    """Largest change without isolation, by the same measure."""
    tolerance: float
    """Largest deviation that rounding explains, by the dtype's precision."""

    @property
    def control_leaks(self) -> bool:
        """Whether the probe can see a leak at all."""
        return self.control_deviation > 10 * self.tolerance

    @property
    def verdict(self) -> Verdict:
        """What is proved: nothing if a deviation is not a number, or if neither the control nor the probe leaks."""
        if math.isnan(self.max_deviation) or math.isnan(self.control_deviation):
            return "cannot tell"
        if self.max_deviation > self.tolerance:
            return "leaks"
        return "isolated" if self.control_leaks else "cannot tell"

    @property
    def passed(self) -> bool:
        return self.verdict == "isolated"


_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Returns the output for q, k and v; all other arguments are those of the probe."""


def probe_isolation(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    causal: bool,
    alibi: bool,
    head_dim: int = 64,
    key_value_heads: int = _HEADS,
    window: int | None = None,
) -> IsolationResult:
    """Probes `backend` (or what `auto` resolves to) through `packed_attention`.

    Raises:
        BackendError: the backend cannot serve such a request.
    """
    borders = torch.tensor((0, *_SEGMENT_LENGTHS)).cumsum(0)
    spans = [slice(start, stop) for start, stop in pairwise(borders.tolist()) if start < stop]
    one_segment = torch.where(borders > 0, borders[-1], 0)
    slopes = torch.exp2(-torch.arange(1.0, _HEADS + 1, device=device)) if alibi else None

    generator = torch.Generator().manual_seed(0)
    shape = (4, int(borders[-1]), _HEADS, head_dim)
    original, replacement = (torch.randn(shape, generator=generator) for _ in range(2))
    replacement = replacement * _REPLACED_SCALE

    def largest_deviation(boundaries: Tensor) -> float:
        segments = Segments(
            cu_seqlens=boundaries.to(device, torch.int32),
            max_sequence_length=int(borders[-1]),
            causal=causal,
            alibi_slopes=slopes,
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, :key_value_heads], v[:, :key_value_heads]
            return packed_attention(q, k, v, segments, window=window, backend=backend)

        tensors = original.to(device, dtype), replacement.to(device, dtype)
        found = torch.stack([_deviation(attend, *tensors, replaced) for replaced in spans])
        return found.max().item()  # torch's max and not Python's: a NaN must stay one

    return IsolationResult(
        max_deviation=largest_deviation(borders),
        control_deviation=largest_deviation(one_segment),
        tolerance=_TOLERATED_EPSILONS * torch.finfo(dtype).eps,
    )


def relative_changes(old: Tensor, new: Tensor, rows: Tensor | slice) -> Tensor:
    """Returns the largest change of any value in each of these rows, relative to the largest old value in all rows."""
    changes = (new[rows] - old[rows]).abs()
    return changes.reshape(len(changes), -1).amax(1) / old.abs().max()


def relative_change(old: Tensor, new: Tensor, rows: Tensor | slice) -> Tensor:
    """Returns the largest change of any value in these rows, relative to the largest old value in all rows."""
    return relative_changes(old, new, rows).max()


def _deviation(attend: _Attention, original: Tensor, replacement: Tensor, replaced: slice) -> Tensor:
    """Returns the larger of the largest change outside of `replaced` and the largest gradient inside of it."""
    changed = original.clone()
    changed[:3, replaced] = replacement[:3, replaced]
    loss_gradient = original[3].clone()
    loss_gradient[replaced] = 0
    before = _run(attend, original[:3], loss_gradient)
    after = _run(attend, changed[:3], loss_gradient)

    others = torch.ones(original.shape[1], dtype=torch.bool)
    others[replaced] = False
    found = [relative_change(old, new, others) for old, new in zip(before, after, strict=True)]
    for gradients in (before[1:], after[1:]):
        found += [gradient[replaced].abs().max() / gradient.abs().max() for gradient in gradients]
    return torch.stack(found).max()


def _run(attend: _Attention, qkv: Tensor, loss_gradient: Tensor) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of q, k and v, in FP64 for comparison."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv.clone().unbind())
    output = attend(q, k, v)
    gradients = torch.autograd.grad(output, (q, k, v), loss_gradient)
    return tuple(tensor.detach().cpu().double() for tensor in (output, *gradients))
