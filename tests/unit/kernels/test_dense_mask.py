"""Attention over whole rows with a mask: the formula's numbers, all pairs of a row, one mask for a micro-batch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from evenpack.errors import BackendError
from evenpack.kernels import capabilities, dense_mask
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend
from evenpack.kernels.segments import Segments

ROW, HEADS, HEAD_DIM = 24, 4, 16
ROWS = ((10, 14), (24,), (1, 1, 3, 0, 19))


def segments(rows: Sequence[Sequence[int]], *, causal: bool = True, slopes: Tensor | None = None) -> Segments:
    return Segments(
        cu_seqlens=torch.tensor([0, *chain(*rows)]).cumsum(0).to(torch.int32),
        max_sequence_length=ROW,
        causal=causal,
        alibi_slopes=slopes,
        row_slots=ROW,
    )


def qkv(tokens: int, *, key_value_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, key_value_heads, key_value_heads)
    return [torch.randn(tokens, each, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for each in heads]


def slopes() -> Tensor:
    return torch.exp2(-torch.arange(1.0, HEADS + 1))


def attended(
    backend: str, rows: Sequence[Sequence[int]], *, causal: bool, alibi: bool = False, key_value_heads: int = HEADS
) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v."""
    parts = qkv(sum(map(sum, rows)), key_value_heads=key_value_heads)
    within = segments(rows, causal=causal, slopes=slopes() if alibi else None)
    output = packed_attention(*parts, within, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, parts, upstream)]


@st.composite
def rows_of_segments(draw: st.DrawFn) -> list[list[int]]:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.lists(st.integers(0, ROW), max_size=4)))
        rows.append([stop - start for start, stop in zip([0, *cuts], [*cuts, ROW], strict=True)])
    return rows


@given(rows=rows_of_segments(), causal=st.booleans(), alibi=st.booleans(), key_value_heads=st.sampled_from([1, HEADS]))
@settings(max_examples=40, deadline=None)
def test_rows_agree_with_the_reference_however_they_are_cut(
    rows: list[list[int]], causal: bool, alibi: bool, key_value_heads: int
) -> None:
    expected = attended("reference", rows, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
    found = attended("dense_mask", rows, causal=causal, alibi=alibi, key_value_heads=key_value_heads)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_all_pairs_of_a_row_are_computed_and_none_between_rows() -> None:
    tokens = ROW * len(ROWS)
    q, k, v = qkv(tokens)
    with FlopCounterMode(display=False) as counter:
        packed_attention(q, k, v, segments(ROWS), backend="dense_mask")
    assert counter.get_total_flops() == 2 * 2 * HEADS * HEAD_DIM * tokens * ROW


def test_half_precision_stays_near_the_formula_and_keeps_its_type() -> None:
    parts = [part.detach() for part in qkv(ROW * len(ROWS), dtype=torch.bfloat16)]
    found, expected = (
        packed_attention(*parts, segments(ROWS, causal=False), backend=backend)
        for backend in ("dense_mask", "reference")
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_dropout_drops_probabilities_and_keeps_their_mean() -> None:
    q, k, v = (part.detach() for part in qkv(ROW))
    torch.manual_seed(0)
    whole = replace(segments([[ROW]], causal=False), row_slots=None)
    draws = [packed_attention(q, k, torch.ones_like(v), whole, dropout=0.25, backend="dense_mask") for _ in range(50)]
    assert torch.stack(draws).std(dim=0).min() > 0.01
    assert torch.stack(draws).mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that are made."""
    masks: list[Tensor] = []
    original = dense_mask.additive_mask

    def noted(*arguments: object, **settings: object) -> Tensor:
        masks.append(original(*arguments, **settings))  # type: ignore[arg-type]
        return masks[-1]

    monkeypatch.setattr(dense_mask, "additive_mask", noted)
    return masks


def test_a_mask_is_made_once_for_all_layers_of_a_micro_batch(made: list[Tensor]) -> None:
    parts, first = qkv(ROW * len(ROWS)), segments(ROWS)

    def layer(within: Segments) -> None:
        packed_attention(*parts, within, backend="dense_mask")

    for _ in range(3):
        layer(first)
    assert len(made) == 1
    layer(segments(ROWS))
    assert len(made) == 2, "another micro-batch"
    first.cu_seqlens[1] = 11
    layer(first)
    assert len(made) == 3, "the same tensor with other boundaries"
    layer(replace(first, causal=False))
    biased = replace(first, causal=False, alibi_slopes=slopes())
    layer(biased)
    layer(biased)
    assert len(made) == 5
    assert made[0].shape == (len(ROWS), 1, ROW, ROW)


def test_it_serves_in_inference_mode() -> None:
    with torch.inference_mode():
        q = torch.randn(8, 2, 4)
        within = replace(segments([[3, 5]]), row_slots=None)
        found, expected = (
            packed_attention(q, q, q, within, backend=backend) for backend in ("dense_mask", "reference")
        )
    torch.testing.assert_close(found, expected)


def test_slots_that_are_not_whole_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="48 slots are not whole rows of 23; dense_mask needs rows of equal length"):
        packed_attention(*qkv(48), replace(segments([[24, 24]]), row_slots=23), backend="dense_mask")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_never_chooses_it(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = AttentionRequest(
        device_type=device_type, dtype=torch.float32, head_dim=64, causal=True, alibi=True, dropout=True
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    for name in capabilities._RULES:
        if name != "dense_mask":
            monkeypatch.setitem(capabilities._RULES, name, lambda _: "it is gone")
    resolve_backend.cache_clear()
    assert resolve_backend("dense_mask", request) == "dense_mask"
    with pytest.raises(BackendError, match="no attention backend can serve"):
        resolve_backend("auto", request)
    resolve_backend.cache_clear()
