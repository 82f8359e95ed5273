"""The placement of sequences: attention and positions in packs and in rectangles."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_shapes import step_shape

from evenpack.data.batches.placement import Placement, Placer
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import Layout

PACK_LENGTH = 20
LONGEST = 8
ROWS = 3

packs_of_sequences = st.lists(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=5).filter(
        lambda pack: sum(map(sum, pack)) <= PACK_LENGTH
    ),
    min_size=1,
    max_size=ROWS,
)
"""Packs of sequences of segment lengths."""


def place(
    packs: Sequence[Sequence[Sequence[int]]], *, is_bidirectional: bool = True, **changes: Any
) -> tuple[Placer, Placement]:
    """Places the packs, packed unless `changes` say otherwise."""
    sequences = [segments for pack in packs for segments in pack]
    selection = PackSelection(
        sources=np.zeros(len(packs), dtype=np.int64),
        stream_positions=np.arange(len(packs)),
        offsets=np.cumsum([0, *map(len, packs)]),
        sequence_ids=np.arange(len(sequences)),
        lengths=np.array([sum(segments) for segments in sequences]),
    )
    placer = Placer(
        shape=step_shape(items_per_micro_batch=ROWS, **{"layout": "packed", **changes}),
        pack_length=PACK_LENGTH,
        max_sequence_length=LONGEST,
        is_bidirectional=is_bidirectional,
    )
    segments = np.array([length for segments in sequences for length in segments])
    counts = np.array([len(segments) for segments in sequences])
    return placer, placer.place(selection, segments, counts, rows=ROWS)


def segments_of(placement: Placement) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*placement.segment_starts.tolist(), placement.slots]))


def tokens_of_packs(packs: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [sum(map(sum, pack)) for pack in packs] + [0] * (ROWS - len(packs))


@pytest.mark.parametrize("is_bidirectional", [False, True])
@given(packs=packs_of_sequences)
@settings(max_examples=60)
def test_without_isolation_a_row_is_one_segment_and_padding_another(
    is_bidirectional: bool, packs: list[list[list[int]]]
) -> None:
    placer, placement = place(packs, is_bidirectional=is_bidirectional, isolate=False)
    expected = []
    for row, tokens in enumerate(tokens_of_packs(packs)):
        start = row * PACK_LENGTH
        expected += [start] * (tokens > 0)
        expected += range(start + tokens, start + PACK_LENGTH, LONGEST)
    assert placement.segment_starts.tolist() == expected
    assert placer.max_segment_length == PACK_LENGTH
    assert max(stop - start for start, stop in segments_of(placement)) <= PACK_LENGTH


@pytest.mark.parametrize("is_bidirectional", [False, True])
@given(packs=packs_of_sequences)
@settings(max_examples=60)
def test_what_is_isolated_or_counted_on_moves_no_token_and_no_target(
    is_bidirectional: bool, packs: list[list[list[int]]]
) -> None:
    _, plain = place(packs, is_bidirectional=is_bidirectional)
    for isolate, reset_positions in ((False, True), (True, False), (False, False)):
        switches = {"isolate": isolate, "reset_positions": reset_positions}
        _, other = place(packs, is_bidirectional=is_bidirectional, **switches)
        assert other.slots == plain.slots
        assert other.slot_of_token.tolist() == plain.slot_of_token.tolist()
        assert other.segment_last_slots.tolist() == plain.segment_last_slots.tolist()
        if reset_positions:
            assert other.position_ids.tolist() == plain.position_ids.tolist()
        if isolate:
            assert other.segment_starts.tolist() == plain.segment_starts.tolist()


@given(packs=packs_of_sequences, isolate=st.booleans())
@settings(max_examples=60)
def test_positions_that_are_not_reset_count_through_each_row(packs: list[list[list[int]]], isolate: bool) -> None:
    placer, placement = place(packs, isolate=isolate, reset_positions=False)
    assert placement.position_ids.tolist() == list(range(PACK_LENGTH)) * ROWS
    assert placer.position_rows == PACK_LENGTH
    assert place(packs)[0].position_rows == LONGEST


@given(packs=packs_of_sequences)
@settings(max_examples=100)
def test_padding_of_a_rectangle_is_a_segment_of_its_own_where_it_would_be_seen(packs: list[list[list[int]]]) -> None:
    sequences = [segments for pack in packs for segments in pack]
    _, both_ways = place(packs, layout="padded")
    _, causal = place(packs, layout="padded", is_bidirectional=False)
    with_padding, real = [], []
    for row, segments in enumerate(sequences):
        starts = [row * LONGEST + start for start in np.cumsum([0, *segments])]
        real += starts[:-1]
        with_padding += starts[:-1] if starts[-1] == (row + 1) * LONGEST else starts
    assert both_ways.segment_starts.tolist() == with_padding
    assert causal.segment_starts.tolist() == real
    assert both_ways.slots == causal.slots == LONGEST * len(sequences)
    for placement in (both_ways, causal):
        positions = [position for start, stop in segments_of(placement) for position in range(stop - start)]
        assert placement.position_ids.tolist() == positions


@pytest.mark.parametrize("layout", ["packed", "unpadded", "padded"])
@given(packs=packs_of_sequences)
@settings(max_examples=40)
def test_no_two_tokens_share_a_slot_and_sequences_are_whole(layout: Layout, packs: list[list[list[int]]]) -> None:
    _, placement = place(packs, layout=layout)
    slots = placement.slot_of_token.tolist()
    assert sorted(set(slots)) == slots
    assert slots[-1] < placement.slots
    lengths = [sum(segments) for pack in packs for segments in pack]
    for start, stop in itertools.pairwise(np.cumsum([0, *lengths]).tolist()):
        assert slots[start:stop] == list(range(slots[start], slots[start] + stop - start))
