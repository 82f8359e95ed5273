"""Every backend on a CPU agrees with the formula, and the right backend is chosen."""

import importlib.abc
import importlib.util
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenpack.errors import BackendError
from evenpack.kernels import attention, capabilities, flash, reference, sdpa, varlen
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend, unavailable_reason
from evenpack.kernels.segments import Segments
from evenpack.visible_pairs import pairs_of_average_length, total_pairs_within, visible_pairs

HEADS, HEAD_DIM = 4, 16
MIXES = [
    (96,),
    (1,) * 20,
    (7, 30, 2, 19, 40, 1, 1, 33, 12),
    (5, 9, 150, 3, 64, 65, 20),
    (0, 12, 0, 0, 70, 1, 0, 8, 0, 0, 0),
]
CPU_REQUEST = AttentionRequest(
    device_type="cpu", dtype=torch.float32, head_dim=64, causal=True, alibi=False, dropout=False
)
CUDA_REQUEST = replace(CPU_REQUEST, device_type="cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _forget_choices() -> Iterator[None]:
    cached = (resolve_backend, varlen._parameters, varlen.dropout_failure)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def segments(
    lengths: tuple[int, ...], *, longest: int | None = None, causal: bool = True, slopes: Tensor | None = None
) -> Segments:
    return Segments(
        cu_seqlens=borders(lengths),
        max_sequence_length=longest or max(lengths),
        causal=causal,
        alibi_slopes=slopes,
    )


def slopes() -> Tensor:
    return torch.exp2(-torch.arange(1.0, HEADS + 1))


def random_qkv(tokens: int, dtype: torch.dtype = torch.float32, *, key_value_heads: int = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    all_heads = (HEADS, key_value_heads, key_value_heads)
    return [torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(dtype) for heads in all_heads]


def run(
    backend: str,
    lengths: tuple[int, ...],
    *,
    causal: bool,
    alibi: bool,
    dtype: torch.dtype = torch.float32,
    key_value_heads: int = HEADS,
    window: int | None = None,
) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v."""
    qkv = random_qkv(sum(lengths), dtype, key_value_heads=key_value_heads)
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    within = segments(lengths, causal=causal, slopes=slopes() if alibi else None)
    output = packed_attention(q, k, v, within, window=window, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), upstream)]


# The formula


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("key_value_heads", [2, HEADS])
def test_the_reference_computes_the_formula_written_out_for_single_queries(
    key_value_heads: int, window: int | None, causal: bool, alibi: bool
) -> None:
    lengths = (0, 5, 1, 0, 9, 3, 0)
    q, k, v = random_qkv(sum(lengths), torch.float64, key_value_heads=key_value_heads)
    reach = window or sum(lengths)
    expected = torch.empty_like(q)
    for start, stop in pairwise(borders(lengths).tolist()):
        for i in range(start, stop):
            first, last = max(start, i - reach), min(i + 1 if causal else stop, i + reach + 1)
            for head in range(HEADS):
                shared = head * key_value_heads // HEADS
                scores = (k[first:last, shared] @ q[i, head]) / HEAD_DIM**0.5
                if alibi:
                    scores -= slopes()[head] * (i - torch.arange(first, last)).abs()
                expected[i, head] = scores.softmax(0) @ v[first:last, shared]
    within = segments(lengths, causal=causal, slopes=slopes() if alibi else None)
    actual = reference.attend(q, k, v, within, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@given(
    lengths=st.sampled_from(MIXES)
    | st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, 90)), min_size=1, max_size=12).filter(sum).map(tuple),
    causal=st.booleans(),
    alibi=st.booleans(),
    key_value_heads=st.sampled_from([1, 2, HEADS]),
    window=st.sampled_from([None, None, 1, 16, 200]),
)
@settings(max_examples=150)
def test_sdpa_gives_the_outputs_and_gradients_of_the_reference(**case: Any) -> None:
    torch.testing.assert_close(run("sdpa", **case), run("reference", **case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_empty_segments_change_no_bit(backend: str) -> None:
    without = run(backend, (12, 70, 8, 1), causal=True, alibi=True)
    with_empty = run(backend, (0, 12, 0, 0, 70, 8, 0, 1, 0, 0), causal=True, alibi=True)
    assert all(torch.equal(a, b) for a, b in zip(without, with_empty, strict=True))


# Windows


def test_a_window_is_refused_by_the_name_of_a_backend_that_has_none(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None]
) -> None:
    cuda(9, 0)
    request = replace(CUDA_REQUEST, window=True)
    assert unavailable_reason("varlen", request) is None
    assert "has no dropout" in (unavailable_reason("varlen", replace(request, dropout=True)) or "")
    monkeypatch.setattr(varlen, "_parameters", lambda: frozenset({"is_causal"}))
    with pytest.raises(
        BackendError, match=r"'varlen' cannot serve .*window.*: varlen_attn of torch .* has no window_size"
    ):
        resolve_backend("varlen", request)


@pytest.mark.parametrize(("causal", "span"), [(False, (5, 5)), (True, (5, 0))])
def test_cuda_kernels_are_given_the_window_on_each_side(
    monkeypatch: pytest.MonkeyPatch, causal: bool, span: tuple[int, int]
) -> None:
    asked = []

    def stand_in(q: Tensor, *_: Any, window_size: tuple[int, int] = (-1, -1), **__: Any) -> Tensor:
        asked.append(window_size)
        return q

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    install_flash(monkeypatch, flash_attn_varlen_func=stand_in)
    for kernel in (varlen, flash):
        kernel.attend(*random_qkv(30), segments((10, 20), causal=causal), window=5)
    assert asked == [span, span]


@pytest.mark.parametrize("window", [None, 1, 2, 7, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs_are_those_that_a_mask_shows(causal: bool, window: int | None) -> None:
    lengths = np.arange(0, 20)
    expected = []
    for length in lengths.tolist():
        visible = torch.ones(length, length, dtype=torch.bool)
        visible = visible.tril() if causal else visible
        visible = visible if window is None else visible.triu(-window).tril(window)
        expected.append(int(visible.sum()))
    assert visible_pairs(lengths, window=window, causal=causal).tolist() == expected
    if window is not None and not causal:
        of_averages = [pairs_of_average_length(Fraction(length), window=window) for length in lengths.tolist()]
        assert of_averages[1:] == expected[1:]
        assert total_pairs_within(lengths, (window,)) == {window: sum(expected)}


# Precision


@pytest.mark.parametrize("alibi", [False, True])
def test_bfloat16_tensors_stay_bfloat16_and_come_near_the_reference(alibi: bool) -> None:
    lengths = (5, 9, 150, 3, 64, 65, 20)
    expected = run("reference", lengths, causal=True, alibi=alibi, dtype=torch.bfloat16)
    actual = run("sdpa", lengths, causal=True, alibi=alibi, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in actual} == {torch.bfloat16}
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_autocast_rounds_q_k_and_v_and_nothing_else(backend: str) -> None:
    """1e-2 is below what an ALiBi bias of 8 bits would do at distance 1000 (bias 250: rounded by up to 0.5)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1000, HEADS, HEAD_DIM, generator=generator) for _ in range(3))
    # Far keys weigh most, so that their bias matters.
    within = segments((1000,), causal=False, slopes=torch.full((HEADS,), -0.25))
    with torch.autocast("cpu", torch.bfloat16):
        actual = packed_attention(q, k, v, within, backend=backend)
    rounded = (tensor.bfloat16().double() for tensor in (q, k, v))
    expected = reference.attend(*rounded, within)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


# Dropout


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("lengths", [(256,), (40, 24, 100, 92)], ids=["one", "four"])
def test_dropout_zeroes_its_share_of_probabilities_and_scales_up_the_rest(
    backend: str, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    q = torch.zeros(tokens, HEADS, tokens)
    v = torch.eye(tokens)[:, None].expand(-1, HEADS, -1).contiguous()  # the output is the probabilities themselves
    probabilities = packed_attention(q, q, v, segments(lengths, causal=False), dropout=0.25, backend=backend)
    starts = borders(lengths).tolist()
    for start, stop in pairwise(starts):
        block = probabilities[start:stop, :, start:stop] * (stop - start)  # 0 or 1 / (1 - 0.25)
        kept = block > 0
        assert kept.float().mean().item() == pytest.approx(0.75, abs=0.05)
        torch.testing.assert_close(block[kept], torch.full_like(block[kept], 4 / 3))
        assert probabilities[start:stop, :, :start].count_nonzero() == 0
        assert probabilities[start:stop, :, stop:].count_nonzero() == 0


# Windows of sdpa


@given(lengths=st.lists(st.integers(0, 100), max_size=30), group_tokens=st.integers(1, 128))
@settings(max_examples=150)
def test_windows_hold_all_segments_in_order_and_only_lone_ones_are_longer(
    lengths: list[int], group_tokens: int
) -> None:
    windows = sdpa.plan_groups(
        tuple(lengths),
        group_tokens=group_tokens,
        causal=False,
        slopes=None,
        mask_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert sum(window.tokens for window in windows) == sum(lengths)
    found = []
    for window in windows:
        if window.mask is None:
            found.append(window.tokens)
            continue
        assert window.tokens <= group_tokens
        starts = [i for i in range(window.tokens) if i == 0 or not window.mask[i, i - 1]]
        found += [stop - start for start, stop in pairwise([*starts, window.tokens])]
    assert found == [length for length in lengths if length]


def test_the_layers_of_a_batch_share_its_masks() -> None:
    sdpa.plan_groups.cache_clear()
    for _ in range(3):
        run("sdpa", (10, 20, 30, 90), causal=True, alibi=True)
    assert sdpa.plan_groups.cache_info().misses == 1
    assert sdpa.plan_groups.cache_info().hits == 2


# Wrong arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"cu_seqlens": torch.tensor(wrong, dtype=torch.int32)}, "must rise from 0 to 10")
            for wrong in ((0, 4, 9), (1, 4, 10), (0, 7, 5, 10), (0,), (0, 11, 10))
        ),
        ({"max_sequence_length": 9}, "10 slots is longer than max_sequence_length=9"),
    ],
)
def test_borders_that_do_not_fit_the_slots_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(*random_qkv(10), replace(segments((10,)), **change))


def test_wrong_shapes_and_border_dtypes_are_refused_without_the_shape_checker() -> None:
    q, k, v = random_qkv(10)
    for wrong in ((q, k[:9], v), (q, k[:9], v[:9]), (q, k[..., :8], v[..., :8]), (q[0], k, v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match=r"q of shape \[T, H, D\]"):
            attention._check_arguments(*wrong, segments((10,)))
    with pytest.raises(ValueError, match=r"must be int32"):
        attention._check_arguments(q, k, v, replace(segments((10,)), cu_seqlens=borders((10,)).long()))


def test_key_value_heads_that_do_not_divide_the_heads_and_a_window_of_nothing_are_refused() -> None:
    q, k, v = random_qkv(10)
    for heads in (0, 3):
        with pytest.raises(ValueError, match=rf"\({heads}\) must divide the heads of q \(4\)"):
            packed_attention(q, k[:, :heads], v[:, :heads], segments((10,)))
    with pytest.raises(ValueError, match="at least 1, found 0"):
        packed_attention(q, k, v, segments((10,)), window=0)


# The choice


def test_every_backend_with_limits_has_an_implementation_and_the_other_way_round() -> None:
    assert capabilities._RULES.keys() == attention.BACKENDS.keys()


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_rules_are_checked_for_all_that_the_call_needs(
    monkeypatch: pytest.MonkeyPatch, alibi: bool, dropout: float, autocast: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(attention, "resolve_backend", lambda *request: asked.append(request) or "reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        within = segments((10,), slopes=slopes() if alibi else None)
        packed_attention(*random_qkv(10), within, dropout=dropout, backend="varlen")
    dtype = torch.bfloat16 if autocast else torch.float32
    request = replace(CPU_REQUEST, dtype=dtype, head_dim=HEAD_DIM, alibi=alibi, dropout=dropout > 0)
    assert asked == [("varlen", request)]


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"'flashy' does not exist.*reference, sdpa, varlen, flash, flash4, flex"):
        resolve_backend("flashy", CPU_REQUEST)


@pytest.mark.parametrize("name", ["varlen", "flash", "flash4"])
def test_a_named_backend_that_cannot_serve_is_an_error_that_says_why_and_who_can(name: str) -> None:
    q, k, v = random_qkv(10)
    with pytest.raises(BackendError, match=rf"'{name}' cannot serve \(cpu, .*needs a CUDA device.*reference, sdpa$"):
        packed_attention(q, k, v, segments((10,)), backend=name)


def test_auto_says_once_for_each_kind_of_request_what_it_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="evenpack"):
        for causal in (True, True, False, True, False):
            packed_attention(*random_qkv(10), segments((10,), causal=causal))
    causal_one, bidirectional = (record.getMessage() for record in caplog.records)
    assert "chose sdpa for (cpu, float32, head_dim 16, causal)" in causal_one
    assert "not flash: it needs a CUDA device" in causal_one
    assert "bidirectional" in bidirectional


@pytest.fixture
def cuda(gpu: Callable[..., None]) -> Callable[[int, int], None]:
    """Makes the rules see a CUDA device of a compute capability, and no Triton."""
    return partial(gpu, has_triton=False)


class _BrokenInstallation(importlib.abc.MetaPathFinder):
    """Imitates a flash_attn that was compiled against another PyTorch."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "flash_attn":
            raise OSError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi\nsecond line")


def install_flash(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    package = types.ModuleType("flash_attn")
    for name, value in contents.items():
        setattr(package, name, value)
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def test_auto_prefers_flash_then_varlen_then_sdpa(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None]
) -> None:
    cuda(9, 0)
    assert resolve_backend("auto", CUDA_REQUEST) == "varlen"
    resolve_backend.cache_clear()
    install_flash(monkeypatch, flash_attn_varlen_func=None)
    assert resolve_backend("auto", CUDA_REQUEST) == "flash"
    cuda(7, 5)
    assert resolve_backend("auto", CUDA_REQUEST) == "sdpa"


def test_a_broken_flash_attn_is_a_reason_and_auto_continues(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None]
) -> None:
    cuda(8, 0)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_BrokenInstallation(), *sys.meta_path])
    reason = unavailable_reason("flash", CUDA_REQUEST) or ""
    assert reason.endswith("cannot be imported: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")
    assert resolve_backend("auto", CUDA_REQUEST) == "varlen"
    with pytest.raises(BackendError, match=r"undefined symbol.*reference, sdpa, varlen$"):
        resolve_backend("flash", CUDA_REQUEST)


def test_flash_attn_absent_or_of_another_generation_is_distinguished(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None]
) -> None:
    cuda(9, 0)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if importlib.util.find_spec("flash_attn") is None:
        assert unavailable_reason("flash", CUDA_REQUEST) == "flash-attn is not installed"
    install_flash(monkeypatch, __path__=["the folder that flash-attn-4 brings"])
    assert unavailable_reason("flash", CUDA_REQUEST) == "flash-attn is not installed"
    install_flash(monkeypatch)
    assert "has no flash_attn_varlen_func" in (unavailable_reason("flash", CUDA_REQUEST) or "")


@pytest.mark.parametrize(
    ("change", "capability", "reasons"),
    [
        ({}, (8, 0), (None, None)),
        ({"causal": False}, (8, 0), (None, None)),
        ({"alibi": True}, (8, 0), ("no gradients with ALiBi", None)),
        ({"alibi": True, "dropout": True}, (8, 0), ("no gradients with ALiBi", None)),
        ({"dropout": True}, (8, 0), (None, None)),
        ({"head_dim": 200}, (8, 0), (None, None)),
        ({"dropout": True, "head_dim": 192}, (12, 0), (None, None)),
        ({"dropout": True, "head_dim": 200}, (8, 0), (None, None)),
        ({"dropout": True, "head_dim": 200}, (9, 0), (None, None)),
        ({"dropout": True, "head_dim": 200}, (8, 9), ("capability 8.0 and 9.0",) * 2),
        ({"dropout": True, "head_dim": 200}, (12, 0), ("capability 8.0 and 9.0",) * 2),
        ({"dtype": torch.float32}, (8, 0), ("not float32",) * 2),
        ({"dtype": torch.float16}, (8, 0), (None, None)),
        ({"head_dim": 264}, (8, 0), ("above 256",) * 2),
        ({"head_dim": 60}, (8, 0), ("multiple of 8", None)),
        ({"device_type": "xpu"}, (8, 0), ("not xpu",) * 2),
    ],
    ids=str,
)
def test_the_limits_of_the_cuda_kernels(
    monkeypatch: pytest.MonkeyPatch,
    cuda: Callable[[int, int], None],
    change: dict[str, Any],
    capability: tuple[int, int],
    reasons: tuple[str | None, str | None],
) -> None:
    cuda(*capability)
    install_flash(monkeypatch, flash_attn_varlen_func=None)
    request = replace(CUDA_REQUEST, **change)
    for backend, expected in zip(("varlen", "flash"), reasons, strict=True):
        reason = unavailable_reason(backend, request)
        assert (reason is None) if expected is None else (expected in (reason or "")), reason
    assert unavailable_reason("reference", request) is None
    assert unavailable_reason("sdpa", request) is None


def test_no_backend_claims_a_cuda_request_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reasons = {unavailable_reason(backend, CUDA_REQUEST) for backend in attention.BACKENDS}
    assert reasons == {"PyTorch sees no CUDA device"}
    with pytest.raises(BackendError, match="no attention backend can serve"):
        resolve_backend("auto", CUDA_REQUEST)


# What the CUDA kernels are asked for, with stand-ins that compute by the reference


def dense(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, slopes: Tensor | None) -> Tensor:
    within = Segments(cu_seqlens=cu_seqlens, max_sequence_length=0, causal=causal, alibi_slopes=slopes)
    return reference.attend(q, k, v, within)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_value_heads", [1, HEADS])
@pytest.mark.parametrize("is_first_release", [False, True])
def test_varlen_asks_each_release_of_torch_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, is_first_release: bool, key_value_heads: int, causal: bool
) -> None:
    """The first takes causality as a flag, and as many keys as queries; later ones a window, and shared keys."""

    def first(*arguments: Any, is_causal: bool = False) -> Tensor:
        assert arguments[1].shape[1] == HEADS
        return dense(*arguments[:4], causal=is_causal, slopes=None)

    def later(*arguments: Any, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
        assert window_size in ((-1, 0), (-1, -1))
        assert enable_gqa == (arguments[1].shape[1] < HEADS)
        assert arguments[1].shape[1] == key_value_heads
        return dense(*arguments[:4], causal=window_size == (-1, 0), slopes=None)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", first if is_first_release else later)
    qkv, within = random_qkv(30, key_value_heads=key_value_heads), segments((10, 20, 0), causal=causal)
    assert torch.equal(varlen.attend(*qkv, within), reference.attend(*qkv, within))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_varlen_refuses_alibi_of_which_there_would_be_no_gradient(dropout: float) -> None:
    q, k, v = random_qkv(10)
    with pytest.raises(ValueError, match="varlen has no ALiBi"):
        varlen.attend(q, k, v, segments((10,), slopes=slopes()), dropout=dropout)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_gives_the_rate_of_dropout_to_the_operator_that_has_it(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    qkv = random_qkv(30, key_value_heads=1)
    asked = []

    def stand_in(*arguments: Any) -> tuple[Tensor, None, None, None, None]:
        asked.append(arguments[4:])
        return dense(*arguments[:4], causal=arguments[8], slopes=None), None, None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in)
    within = segments((10, 20, 0), longest=25, causal=causal)
    actual = varlen.attend(*qkv, within, dropout=0.1)
    assert torch.equal(actual, reference.attend(*qkv, within))
    assert asked == [(within.cu_seqlens, 25, 25, 0.1, causal, False)]


def test_dropout_in_varlen_has_gradients_by_torchs_own_backward_pass() -> None:
    q, k, v = (
        torch.empty(30, heads, HEAD_DIM, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (HEADS, 1, 1)
    )
    boundaries = torch.empty(4, dtype=torch.int32, device="meta")
    within = Segments(cu_seqlens=boundaries, max_sequence_length=20, causal=True)
    output = varlen.attend(q, k, v, within, dropout=0.1)
    assert "FlashAttentionBackward" in type(output.grad_fn).__name__
    gradients = torch.autograd.grad(output, (q, k, v), torch.empty_like(output))
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", varlen.DROPPING)
def test_dropout_in_varlen_is_refused_where_torchs_private_operators_are_others(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None], name: str
) -> None:
    cuda(9, 0)
    request = replace(CUDA_REQUEST, dropout=True)
    assert unavailable_reason("varlen", request) is None
    for stand_in, reason in ((None, "has no operator aten."), (torch.ops.aten.mm, r"takes \(self mat2\), expected \(")):
        varlen.dropout_failure.cache_clear()
        monkeypatch.setattr(torch.ops.aten, name, stand_in)
        assert re.search(reason, unavailable_reason("varlen", request) or "")
        assert unavailable_reason("varlen", CUDA_REQUEST) is None


def test_varlen_is_refused_where_torch_answers_it_by_cudnn(
    monkeypatch: pytest.MonkeyPatch, cuda: Callable[[int, int], None]
) -> None:
    cuda(9, 0)
    dropping = replace(CUDA_REQUEST, dropout=True)  # an operator of FlashAttention's own
    assert unavailable_reason("varlen", CUDA_REQUEST) is None
    monkeypatch.setattr(torch.nn.attention.varlen, "_should_use_cudnn", lambda _: True)
    assert "runs cuDNN" in (unavailable_reason("varlen", CUDA_REQUEST) or "")
    assert unavailable_reason("varlen", dropping) is None
    monkeypatch.delattr(torch.nn.attention.varlen, "_should_use_cudnn")  # as in releases before
    assert unavailable_reason("varlen", CUDA_REQUEST) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_is_given_slopes_in_fp32_dropout_and_determinism(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    seen: dict[str, object] = {}

    def stand_in(*arguments: Any, causal: bool, alibi_slopes: Tensor, dropout_p: float, deterministic: bool) -> Tensor:
        assert torch.equal(arguments[3], arguments[4])
        assert alibi_slopes.dtype == torch.float32
        seen.update(longest=arguments[5:], dropout=dropout_p, deterministic=deterministic)
        return dense(*arguments[:4], causal=causal, slopes=alibi_slopes)

    install_flash(monkeypatch, flash_attn_varlen_func=stand_in)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    qkv, within = random_qkv(30), segments((10, 20, 0), slopes=slopes().bfloat16())
    actual = flash.attend(*qkv, within, dropout=0.1)
    assert torch.equal(actual, reference.attend(*qkv, replace(within, alibi_slopes=slopes())))
    assert seen == {"longest": (20, 20), "dropout": 0.1, "deterministic": deterministic}


@pytest.mark.parametrize(("device_type", "is_left_out"), [("cuda", True), ("cpu", False)])
def test_sdpa_leaves_out_cudnn_which_plans_each_new_length_on_cuda(device_type: str, is_left_out: bool) -> None:
    def enabled() -> list[bool]:
        of = torch.backends.cuda
        return [of.cudnn_sdp_enabled(), of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled()]

    before = enabled()
    assert all(before)
    with sdpa._kernels(device_type):
        assert enabled() == [not is_left_out, True, True, True]
    assert enabled() == before
