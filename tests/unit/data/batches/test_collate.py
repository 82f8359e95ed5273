"""Packs become batches: every token in its place, no target across a boundary, fixed shapes."""

import itertools

import numpy as np
import torch
from collated import PADDING_TOKEN, collator_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.keys import derive_key
from evenpack.data.order.selection import PackSelection, order_hash, select_packs
from evenpack.data.order.step_shape import Layout
from evenpack.losses import StepCounts

COUNTS = StepCounts(packs=1, sequences=1, tokens=1, targets=1)
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")

sequence_lists = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda s: sum(s) <= 12), min_size=1
)


def segments_of(batch: PackedBatch) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    """Returns tokens, positions, labels and weights of every non-empty segment."""
    borders = batch.cu_seqlens.tolist()
    fields = (batch.tokens, batch.position_ids, batch.targets["next_token"].labels, batch.targets["next_token"].weights)
    return [
        tuple(field[start:stop].tolist() for field in fields)  # type: ignore[misc]
        for start, stop in itertools.pairwise(borders)
        if stop > start
    ]


@given(sequences=sequence_lists, layout=st.sampled_from(LAYOUTS), pack_length=st.sampled_from([12, 17, 40]))
@settings(max_examples=150)
def test_every_segment_stands_whole_with_its_own_positions_and_targets(
    sequences: list[list[int]], layout: Layout, pack_length: int
) -> None:
    source = packed_source(sequences, pack_length=pack_length, longest=12)
    packs = select_packs([source], np.zeros(3, dtype=np.int64), np.arange(3))
    shape = step_shape(layout=layout, items_per_micro_batch=3)
    batch = collator_of([source], shape, pack_length=pack_length).collate(packs, COUNTS)
    expected = []
    for sequence in packs.sequence_ids:
        tokens = source.view.tokens(int(sequence))  # type: ignore[attr-defined]
        borders = np.cumsum([0, *sequences[int(sequence)]])
        expected += [tokens[a:b].tolist() for a, b in itertools.pairwise(borders)]
    found = []
    for tokens, positions, labels, weights in segments_of(batch):
        assert positions == list(range(len(tokens)))
        real = [token for token in tokens if token != PADDING_TOKEN]
        assert tokens == real + [PADDING_TOKEN] * (len(tokens) - len(real)), "padding is only ever at the end"
        predicting = max(len(real) - 1, 0)
        assert weights == [1.0] * predicting + [0.0] * (len(tokens) - predicting)
        assert labels == real[1:] + [0] * (len(tokens) - predicting)
        if real:
            found.append(real)
    assert found == expected
    assert batch.local_counts.tokens == sum(map(len, expected))
    assert batch.local_counts.targets == sum(len(tokens) - 1 for tokens in expected)
    assert batch.local_counts.sequences == len(packs.sequence_ids)
    assert batch.squared_lengths == sum(len(tokens) ** 2 for tokens in expected)
    assert batch.source_tokens == (batch.local_counts.tokens,)
    lengths = torch.diff(batch.cu_seqlens)
    assert batch.cu_seqlens[[0, -1]].tolist() == [0, batch.slots]
    assert 0 <= lengths.min() <= lengths.max() <= batch.max_sequence_length == 12


def test_the_order_hash_counts_source_pack_slot_and_sequence() -> None:
    packs = PackSelection(
        sources=np.array([1, 0]),
        stream_positions=np.array([7, 9]),
        offsets=np.array([0, 2, 3]),
        sequence_ids=np.array([5, 6, 8]),
        lengths=np.array([3, 2, 4]),
    )
    plain = [derive_key(1, 7, 0, 5), derive_key(1, 7, 1, 6), derive_key(0, 9, 0, 8)]
    assert order_hash(packs) == sum(map(int, plain)) % 2**64
