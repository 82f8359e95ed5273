"""FlexAttention: its masks of blocks, its numbers on a CPU, and when the mask is made."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenpack.kernels import flex, reference
from evenpack.kernels.segments import Segments, segment_of_slots

HEADS, HEAD_DIM = 3, 16
MIXES = [
    (96,),
    (1,) * 20,
    (128, 128, 256),
    (300, 0, 5, 200, 130, 7, 0, 0),
    (0, 12, 0, 0, 70, 1, 0, 300, 0, 0, 0),
]


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def segments(lengths: tuple[int, ...], *, causal: bool, slopes: Tensor | None = None) -> Segments:
    return Segments(cu_seqlens=borders(lengths), max_sequence_length=max(lengths), causal=causal, alibi_slopes=slopes)


@pytest.fixture
def _directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls PyTorch's formula without tracing it, which takes a second for each shape."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("_directly")
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("key_value_heads", "window"), [(1, None), (HEADS, None), (HEADS, 1), (1, 130)])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_outputs_are_those_of_the_reference(
    lengths: tuple[int, ...], key_value_heads: int, window: int | None, causal: bool, alibi: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, key_value_heads, key_value_heads)
    q, k, v = (torch.randn(sum(lengths), count, HEAD_DIM, generator=generator) for count in heads)
    slopes = torch.exp2(-torch.arange(1.0, HEADS + 1)) if alibi else None
    arguments = (q, k, v, segments(lengths, causal=causal, slopes=slopes))
    found, expected = flex.attend(*arguments, window=window), reference.attend(*arguments, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=120)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=8).filter(sum),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 400),
)
def test_blocks_are_those_that_hold_a_visible_pair(lengths: list[int], causal: bool, window: int | None) -> None:
    cu_seqlens, tokens = borders(tuple(lengths)), sum(lengths)
    slots = segment_of_slots(cu_seqlens, tokens)
    partial, whole = flex.visible_blocks(cu_seqlens, slots, causal=causal, window=window)
    side = flex.BLOCK * len(partial)
    visible = torch.zeros(side, side, dtype=torch.bool)
    for start, stop in pairwise(cu_seqlens.tolist()):
        visible[start:stop, start:stop] = True
    visible = visible.tril() if causal else visible
    visible = visible if window is None else visible.triu(-window).tril(window)
    pairs = visible.view(len(partial), flex.BLOCK, len(partial), flex.BLOCK).transpose(1, 2).flatten(2)
    seen = pairs.any(dim=2)
    assert torch.equal(whole, pairs.all(dim=2))
    assert not (seen & ~partial & ~whole).any()
    if window is None:
        assert torch.equal(partial, seen & ~whole)
        mask = flex.block_mask(cu_seqlens, tokens, causal=causal)
        assert torch.equal(mask.to_dense()[0, 0].bool(), seen), "as PyTorch reads the lists of blocks"
    else:
        nearest = (torch.arange(len(partial))[:, None] - torch.arange(len(partial))).abs() - 1
        assert not (partial & (nearest * flex.BLOCK >= window)).any(), "blocks beyond the window are not computed"


def test_the_layers_of_a_micro_batch_share_a_mask_that_goes_with_it_and_the_next_one_has_its_own() -> None:
    before = len(flex._MASKS)
    cu_seqlens = borders((100, 60))
    first = flex._mask(cu_seqlens, 160, causal=True, window=None)
    assert flex._mask(cu_seqlens, 160, causal=True, window=8) is not first, "layers with a window have another"
    assert flex._mask(cu_seqlens, 160, causal=True, window=None) is first
    assert flex._mask(borders((100, 60)), 160, causal=True, window=None) is not first
    assert flex._mask(cu_seqlens, 160, causal=False, window=None) is not first
    cu_seqlens[1] = 40  # a buffer that the next micro-batch is copied into
    assert flex._mask(cu_seqlens, 160, causal=True, window=None) is not first
    assert len(flex._MASKS) > before
    del cu_seqlens
    assert len(flex._MASKS) == before


def test_dropout_is_never_left_out_silently() -> None:
    q = torch.zeros(4, 1, 16)
    with pytest.raises(ValueError, match="has no dropout"):
        flex.attend(q, q, q, segments((4,), causal=True), dropout=0.1)
