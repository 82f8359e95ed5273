"""Packs become batches: every token in its place, no target across a boundary, fixed shapes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import NextTokens
from evenpack.data.keys import derive_key
from evenpack.data.order.selection import PackedSource, PackSelection, order_hash, select_packs
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import CostWeights, Layout
from evenpack.errors import DataError
from evenpack.losses import StepCounts

PADDING_TOKEN = 3
VOCABULARY_SIZE = 1_000_000
COUNTS = StepCounts(packs=1, sequences=1, tokens=1, targets=1)
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")

sequence_lists = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda s: sum(s) <= 12), min_size=1
)


def select(source: PackedSource, packs: int) -> PackSelection:
    return select_packs([source], np.zeros(packs, dtype=np.int64), np.arange(packs))


def collator(source: PackedSource, layout: Layout, rows: int, pack_length: int) -> Collator:
    return Collator(
        [source],
        shape=step_shape(layout=layout, items_per_micro_batch=rows),
        objective=NextTokens(),
        pack_length=pack_length,
        padding_token=PADDING_TOKEN,
        vocabulary_size=VOCABULARY_SIZE,
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
@settings(deadline=None, max_examples=150)
def test_every_segment_stands_whole_with_its_own_positions_and_targets(
    sequences: list[list[int]], layout: Layout, pack_length: int
) -> None:
    source = packed_source(sequences, pack_length=pack_length, longest=12)
    packs = select(source, packs=3)
    batch = collator(source, layout, rows=3, pack_length=pack_length).collate(packs, COUNTS)
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


@given(sequences=sequence_lists, layout=st.sampled_from(LAYOUTS), pack_length=st.sampled_from([12, 17, 40]))
@settings(deadline=None, max_examples=100)
def test_segments_never_exceed_the_static_bound_and_cover_all_slots(
    sequences: list[list[int]], layout: Layout, pack_length: int
) -> None:
    source = packed_source(sequences, pack_length=pack_length, longest=12)
    batch = collator(source, layout, rows=2, pack_length=pack_length).collate(select(source, packs=2), COUNTS)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == batch.slots
    lengths = torch.diff(batch.cu_seqlens)
    assert (lengths >= 0).all()
    assert lengths.max() <= batch.max_sequence_length == 12


def test_sources_keep_their_tokens_apart() -> None:
    first = packed_source([[5], [4], [3]], pack_length=12, longest=12, first_token=1000)
    second = packed_source([[7], [6, 2]], pack_length=12, longest=12, first_token=5000)
    shape = step_shape(items_per_step=4)
    planner = StepPlanner([first, second], [1, 1], shape=shape, ranks=1, objective=NextTokens())
    plan = planner.plan(0)
    both = Collator(
        [first, second],
        shape=shape,
        objective=NextTokens(),
        pack_length=12,
        padding_token=PADDING_TOKEN,
        vocabulary_size=VOCABULARY_SIZE,
    )
    batch = both.collate(plan.micro_batch(0, 0), plan.counts)
    rows = batch.tokens.reshape(4, 12)
    for row, source in zip(rows, plan.packs.sources[plan.assignment.items_of(0)], strict=True):
        real = row[row != PADDING_TOKEN]
        assert ((real >= 5000) == (source == 1)).all()
    assert sum(batch.source_tokens) == batch.local_counts.tokens == plan.counts.tokens
    assert min(batch.source_tokens) > 0


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


def test_the_order_hash_depends_on_the_packs_and_not_on_their_assignment() -> None:
    source = packed_source([[length] for length in range(1, 13)] * 3, pack_length=12, longest=12)
    packs = select(source, packs=8)
    whole = order_hash(packs)
    halves = sum(order_hash(packs.take(np.array(half))) for half in ([5, 0, 2, 7], [1, 3, 6, 4])) % 2**64
    assert whole == halves
    assert whole != order_hash(packs.take(np.arange(7)))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    source = packed_source([[5], [4]], pack_length=12, longest=12, first_token=1000)
    one = Collator(
        [source],
        shape=step_shape(),
        objective=NextTokens(),
        pack_length=12,
        padding_token=0,
        vocabulary_size=1015,
    )
    with pytest.raises(DataError, match="token id 1015, the vocabulary has 1015 entries"):
        one.collate(select(source, packs=1), COUNTS)


def test_a_batch_counts_the_windows_of_its_model_and_its_cost_those_of_the_weights() -> None:
    source = packed_source([[5, 2], [3], [6, 1, 4], [7], [2, 2], [9]], pack_length=12, longest=12)
    weights = CostWeights(per_token=1.0, per_squared_length=0.5, per_segment=0.0, per_pair_within={2: 0.25, 4: 2.0})
    for windows in ((), (3,), (2, 4)):
        shape = step_shape(items_per_step=2, cost_weights=weights, windows=windows)
        plan = StepPlanner([source], [1], shape=shape, ranks=1, objective=NextTokens()).plan(0)
        collator = Collator(
            [source],
            shape=shape,
            objective=NextTokens(),
            pack_length=12,
            padding_token=PADDING_TOKEN,
            vocabulary_size=VOCABULARY_SIZE,
        )
        batch = collator.collate(plan.micro_batch(0, 0), plan.counts)
        assert plan.cost_of(0, 0) == pytest.approx(plan.cost(0))
        assert tuple(batch.pairs_within) == windows
