"""Attention over real micro-batches beside the formula, and the loss before and now, each by itself."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from evenpack.batch import PackedBatch
from evenpack.engine.config import RunConfig
from evenpack.kernels import cross_entropy
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.kernels.segments import Segments
from evenpack.models.families import family_of

MOST_ERROR = 0.02
"""Relative error of a BF16 output or gradient beside the formula in FP32; rounding alone is some 0.004."""
COMPARED_SLOTS = 2048
"""Those of the formula, which holds the scores of all pairs."""
MANY_SEGMENTS = 910
"""Room that a micro-batch of GPT-2 124M once had, for 97 segments."""

_REPEATS = 10
_AHEAD_CYCLES = 50_000_000
"""Of a GPU, some 30 ms, in which the host issues what is timed: short kernels would wait for it."""


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the median of some calls after a warm-up: on a GPU between two events, else by the host's clock."""
    for _ in range(2):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(2):
            started = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    new_event: Any = torch.cuda.Event  # has no annotations
    marks = [new_event(enable_timing=True) for _ in range(_REPEATS + 1)]
    sleep: Any = torch.cuda._sleep
    sleep(_AHEAD_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(before.elapsed_time(after)) for before, after in pairwise(marks))


class AttentionLayer:
    """Attention of one layer of a run over the boundaries of a micro-batch; q, k and v are one tensor."""

    def __init__(self, config: RunConfig, batch: PackedBatch, device: torch.device) -> None:
        model = config.model
        self._causal, self._longest = family_of(model).causal, batch.max_sequence_length
        self._shape = (-1, model.shape["hidden_size"] // model.head_dim, model.head_dim)
        self._width, self.device = model.shape["hidden_size"], device
        self.room = batch.cu_seqlens.to(device)
        self.real = torch.unique(self.room)

    def attend(self, merged: Tensor, boundaries: Tensor, backend: str) -> Tensor:
        """Returns the output for queries, keys and values side by side, [T, 3 C]."""
        q, k, v = (part.view(self._shape) for part in torch.split(merged, self._width, dim=1))
        whole = merged.view(len(merged), -1, self._shape[-1])
        segments = Segments(cu_seqlens=boundaries, max_sequence_length=self._longest, causal=self._causal)
        return packed_attention(q, k, v, segments, backend=backend, merged=whole)

    def numbers(self, slots: int) -> Tensor:
        """Returns the same random numbers at each call, which get gradients."""
        torch.manual_seed(0)
        return torch.randn(slots, 3 * self._width, device=self.device, dtype=torch.bfloat16).requires_grad_()

    def errors(self, backend: str) -> dict[str, float]:
        """Returns the relative errors of the output and the gradients, the room's empty segments included."""
        borders = self.real[self.real <= max(COMPARED_SLOTS, int(self.real[1]))].to(torch.int32)
        borders = F.pad(borders, (0, len(self.room) - len(borders)), value=int(borders[-1]))
        found = []
        for name, dtype in ((backend, torch.bfloat16), ("reference", torch.float32)):
            merged = self.numbers(int(borders[-1])).detach().to(dtype).requires_grad_()
            output = self.attend(merged, borders, name)
            incoming = torch.sin(torch.arange(output.numel(), device=self.device)).view_as(output).to(torch.bfloat16)
            (gradient,) = torch.autograd.grad(output, merged, incoming.to(dtype))
            found.append([output.detach().flatten(), *torch.split(gradient, self._width, dim=1)])
        names = ("output", "query", "key", "value")
        return {
            name: float((ours.float() - exact).norm() / exact.norm())
            for name, ours, exact in zip(names, *found, strict=True)
        }

    def times(self, backend: str) -> dict[str, dict[str, float]]:
        """Returns milliseconds with room for the real segments alone, for the run's, and for many."""
        merged = self.numbers(int(self.real[-1]))
        many = max(MANY_SEGMENTS + 1, len(self.room))
        found = {}
        for room in (len(self.real), len(self.room), many):
            borders = F.pad(self.real, (0, room - len(self.real)), value=int(self.real[-1])).to(torch.int32)

            def both(borders: Tensor = borders) -> None:
                output = self.attend(merged, borders, backend)
                torch.autograd.grad(output, merged, torch.ones_like(output))

            def forward(borders: Tensor = borders) -> None:
                self.attend(merged, borders, backend)

            found[f"room for {room - 1}"] = {
                "forward_milliseconds": milliseconds(forward, self.device),
                "both_milliseconds": milliseconds(both, self.device),
            }
        return found


def attention_row(layer: AttentionLayer, backend: str) -> dict[str, Any]:
    """Returns a backend's errors beside `reference`, whether they are those of rounding, and its times."""
    errors = layer.errors(backend)
    is_right = all(error <= MOST_ERROR for error in errors.values())  # false for NaN too
    return {"errors": errors, "is_right": is_right, "segments": len(layer.real) - 1, **layer.times(backend)}


@contextmanager
def loss_as_before() -> Iterator[None]:
    """Lets the loss run over the vocabulary's columns alone, a slice of the padded ones, as it did until a661bb96."""
    with (
        mock.patch.object(cross_entropy, "_chunk_sums", _chunk_sums_before),
        mock.patch.object(cross_entropy, "_compiler", _compiler_before),
    ):
        yield


@cache
def _compiler_before() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(_chunk_sums_before)
    return compiled


def _chunk_sums_before(
    logits: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    *,
    entries: int,
    wants_gradient: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    exponentials = logits[:, :entries].to(weights.dtype)
    if bias is not None:
        exponentials += bias[:entries]
    totals, loss, correct = cross_entropy._loss_(exponentials, labels, weights)
    if not wants_gradient:
        return loss, correct, None
    gradient = cross_entropy._logit_gradient_(exponentials, totals, labels, weights)
    logits[:, :entries].copy_(gradient)  # beyond, logits are zeros
    surplus = logits.shape[1] - entries
    return loss, correct, F.pad(gradient.sum(dim=0), (0, surplus)) if wants_bias else None


def loss_row(tokens: int, width: int, vocabulary: int, *, compiled: bool, device: torch.device) -> dict[str, Any]:
    """Returns milliseconds of the head and its loss, forward and backward, before and now, and how they differ."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).requires_grad_()
    labels, weights = torch.randint(vocabulary, (tokens,), device=device), torch.ones(tokens, device=device)

    def both() -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16):
            total, _ = linear_cross_entropy(hidden, weight, labels, weights, compiled=compiled)
        return (total.detach(), *torch.autograd.grad(total, (hidden, weight)))

    with loss_as_before():
        before, before_milliseconds = both(), milliseconds(both, device)
    now, now_milliseconds = both(), milliseconds(both, device)
    differences = [float((one - other).norm() / other.norm()) for one, other in zip(now, before, strict=True)]
    return {
        "before_milliseconds": before_milliseconds,
        "now_milliseconds": now_milliseconds,
        "differences": dict(zip(("loss", "hidden", "weight"), differences, strict=True)),
        "is_right": max(differences) <= MOST_ERROR,
    }
