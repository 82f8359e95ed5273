"""The isolation probe passes isolating attention, and detects every kind of leak."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenpack.errors import BackendError
from evenpack.kernels import attention, reference, sdpa
from evenpack.kernels.isolation import IsolationResult, probe_isolation
from evenpack.kernels.segments import Segments


def probe(backend: str, **case: Any) -> IsolationResult:
    return probe_isolation(backend, **{"device": "cpu", "dtype": torch.float32, "causal": True, "alibi": False} | case)


@pytest.mark.parametrize(
    "case", [{}, {"alibi": True}, {"dtype": torch.bfloat16}, {"key_value_heads": 1}, {"window": 7}], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_no_bit_of_another_segment_changes_and_the_control_leaks(
    backend: str, causal: bool, case: dict[str, Any]
) -> None:
    result = probe(backend, causal=causal, **case)
    assert result.max_deviation == 0
    assert result.control_deviation > 1
    assert result.passed


def test_a_backend_that_cannot_serve_is_an_error_and_not_a_pass() -> None:
    with pytest.raises(BackendError, match="cannot serve"):
        probe("flash")


def shift_borders(cu_seqlens: Tensor) -> Tensor:
    """Shifts boundaries: each segment takes the first position of the next."""
    shifted = (cu_seqlens + 1).clamp(max=int(cu_seqlens[-1]))
    shifted[0] = 0
    return shifted


def ignore_borders(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens[[0, -1]]


class _LeakGradients(torch.autograd.Function):
    """Passes values through; a thousandth of each position's gradient also goes to the position before."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 1e-3 * gradients[0].roll(-1, dims=0)


def with_borders(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any) -> Tensor:
        return sdpa.attend(q, k, v, replace(segments, cu_seqlens=change(segments.cu_seqlens)), **options)

    return attend


def with_leaking_gradients(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
    leaking: Tensor = _LeakGradients.apply(v)
    return reference.attend(q, k, leaking, *arguments, **options)


def with_nan(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return reference.attend(q, *arguments, **options) * torch.nan


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "broken",
    [with_borders(ignore_borders), with_borders(shift_borders), with_leaking_gradients, with_nan],
    ids=["ignores the borders", "borders one late", "gradients leak", "not a number"],
)
def test_a_backend_that_leaks_fails(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Tensor], causal: bool
) -> None:
    monkeypatch.setitem(attention.BACKENDS, "sdpa", broken)
    assert not probe("sdpa", causal=causal).passed


def test_a_probe_whose_control_sees_no_leak_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.BACKENDS, "sdpa", lambda q, k, v, *_, **__: q * k * v)  # each position alone
    result = probe("sdpa")
    assert result.max_deviation == 0
    assert not result.control_leaks
    assert not result.passed


def test_a_deviation_that_is_not_a_number_never_passes() -> None:
    assert not IsolationResult(max_deviation=float("nan"), control_deviation=5.0, tolerance=1e-6).passed
