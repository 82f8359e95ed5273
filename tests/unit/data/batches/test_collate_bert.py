"""Packs of sentence pairs become batches whose arrays agree with the pairs one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from collated import batches_of, collator_of, planner_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_sources import VOCABULARY_SIZE, Pair, masked_objective, pair_source, random_sentence_pairs
from step_shapes import step_shape

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.data.batches.objectives import DynamicMasks
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.order.step_shape import UNPADDED_SLOT_MULTIPLE, Layout
from evenpack.data.sequences.masking import mask_sequences, masking_keys

PADDING_TOKEN = 1
"""No pair holds it."""
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")
PACKS_PER_STEP = 8
LONGEST = 40

halves = st.tuples(st.integers(1, 18), st.integers(1, 19))


@dataclass(kw_only=True)
class Expected:
    """The expected contents of a batch, computed slot by slot."""

    tokens: list[int] = field(default_factory=list)
    token_types: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segment_starts: list[int] = field(default_factory=list)
    targets: list[tuple[int, int, float]] = field(default_factory=list)
    """Slot, label, weight."""
    sequences: list[tuple[int, int]] = field(default_factory=list)
    """First slot, next-sentence label."""

    def add_padding_up_to(self, slots: int) -> None:
        while len(self.tokens) < slots:
            piece = min(slots - len(self.tokens), LONGEST)
            self._add_segment([PADDING_TOKEN] * piece, [0] * piece)

    def add_pair(self, pair: Pair, seen: list[int], masked: list[tuple[int, int]], reduction: str) -> None:
        first_slot = len(self.tokens)
        self.sequences.append((first_slot, pair.label))
        weight = 1.0 if reduction == "targets" else 1.0 / max(len(masked), 1)
        self.targets += [(first_slot + position, label, weight) for position, label in masked]
        self._add_segment(seen, [0] * pair.first_length + [1] * (len(seen) - pair.first_length))

    def _add_segment(self, tokens: list[int], token_types: list[int]) -> None:
        self.segment_starts.append(len(self.tokens))
        self.tokens += tokens
        self.token_types += token_types
        self.positions += range(len(tokens))


def masked_alone(
    pair: Pair, objective: DynamicMasks, source_key: int, epoch: int, sequence: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the model input of one sequence, and (position, label) of its masks, computed separately."""
    key = masking_keys(objective.seed, np.array([epoch]), np.array([source_key], dtype=np.uint64), np.array([sequence]))
    tokens, offsets = np.array(pair.tokens), np.array([0, len(pair.tokens)])
    masked = mask_sequences(tokens, offsets, key, objective.masking, objective.vocabulary)
    return masked.tokens.tolist(), list(zip(masked.positions.tolist(), masked.labels.tolist(), strict=True))


def expect(
    packs: PackSelection,
    sources: Sequence[PackedSource],
    pairs: Sequence[Sequence[Pair]],
    objective: DynamicMasks,
    *,
    layout: Layout,
    rows: int,
    pack_length: int,
) -> Expected:
    """Computes the batch of these packs, sequence by sequence."""
    expected = Expected()
    for index in range(packs.packs):
        source = int(packs.sources[index])
        epoch = int(packs.stream_positions[index]) // sources[source].plan.packs
        for sequence in packs.sequence_ids[packs.offsets[index] : packs.offsets[index + 1]].tolist():
            pair, before = pairs[source][sequence], len(expected.tokens)
            seen, masked = masked_alone(pair, objective, sources[source].key, epoch, sequence)
            expected.add_pair(pair, seen, masked, objective.masked_token.divided_by)
            if layout == "padded":
                expected.add_padding_up_to(before + LONGEST)
        if layout == "packed":
            expected.add_padding_up_to((index + 1) * pack_length)
    if layout == "packed":
        for row in range(packs.packs, rows):
            expected.add_padding_up_to((row + 1) * pack_length)
    if layout == "unpadded":
        expected.add_padding_up_to(-(-len(expected.tokens) // UNPADDED_SLOT_MULTIPLE) * UNPADDED_SLOT_MULTIPLE)
    return expected


def chosen(batch: PackedBatch, loss: str) -> ChosenTargets:
    targets = batch.targets[loss]
    assert isinstance(targets, ChosenTargets)
    return targets


def found_targets(batch: PackedBatch) -> list[tuple[int, int, float]]:
    """Returns slot, label and weight of all real targets; padding must be zero and last."""
    targets = chosen(batch, "masked_token")
    count = batch.local_counts.targets
    arrays = (targets.positions, targets.labels, targets.weights)
    assert not any(array[count:].any() for array in arrays)
    return list(zip(*(array[:count].tolist() for array in arrays), strict=True))


def found_sequences(batch: PackedBatch) -> list[tuple[int, int]]:
    targets = chosen(batch, "next_sentence")
    count = batch.local_counts.sequences
    assert targets.weights.tolist() == [1.0] * count + [0.0] * (len(targets.weights) - count)
    assert not targets.positions[count:].any()
    assert not targets.labels[count:].any()
    return list(zip(targets.positions[:count].tolist(), targets.labels[:count].tolist(), strict=True))


def assert_is(batch: PackedBatch, expected: Expected) -> None:
    assert batch.tokens.tolist() == expected.tokens
    assert batch.token_type_ids.tolist() == expected.token_types
    assert batch.position_ids.tolist() == expected.positions
    borders = [*expected.segment_starts, batch.slots]
    assert batch.cu_seqlens.tolist() == borders + [batch.slots] * (len(batch.cu_seqlens) - len(borders))
    assert torch.diff(batch.cu_seqlens).max() <= batch.max_sequence_length == LONGEST
    found = found_targets(batch)
    assert [target[:2] for target in found] == [target[:2] for target in expected.targets]
    assert [weight for *_, weight in found] == pytest.approx([weight for *_, weight in expected.targets], rel=1e-6)
    assert found_sequences(batch) == expected.sequences
    assert batch.local_counts.sequences == len(expected.sequences)


@given(
    first=st.lists(halves, min_size=1, max_size=12),
    second=st.lists(halves, min_size=1, max_size=6),
    layout=st.sampled_from(LAYOUTS),
    reduction=st.sampled_from(["token", "sequence"]),
    pack_length=st.sampled_from([40, 64, 130]),
    whole_words=st.booleans(),
    division=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)]),
    step=st.integers(0, 7),
)
@settings(max_examples=120)
def test_every_array_is_that_of_the_pairs_one_by_one(
    *,
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    layout: Layout,
    reduction: str,
    pack_length: int,
    whole_words: bool,
    division: tuple[int, int],
    step: int,
) -> None:
    """The masks of a pair are those of its seed, source and epoch, however a step is divided and laid out."""
    pairs = [random_sentence_pairs(first, seed=1), random_sentence_pairs(second, seed=2)]
    sources = [
        pair_source(of_one, pack_length=pack_length, longest=LONGEST, key=11 + index)
        for index, of_one in enumerate(pairs)
    ]
    objective = masked_objective(reduction=reduction, whole_words=whole_words)
    ranks, micro_batches = division
    packs_of_one = PACKS_PER_STEP // (ranks * micro_batches)
    shape = step_shape(items_per_step=PACKS_PER_STEP, items_per_micro_batch=packs_of_one)
    rows = packs_of_one + 1  # one is left empty
    collator = collator_of(
        sources,
        step_shape(layout=layout, items_per_micro_batch=rows),
        objective,
        pack_length=pack_length,
        padding_token=PADDING_TOKEN,
        vocabulary_size=VOCABULARY_SIZE,
    )
    for packs, batch in batches_of(planner_of(sources, shape, objective, ranks=ranks), collator, step):
        expected = expect(packs, sources, pairs, objective, layout=layout, rows=rows, pack_length=pack_length)
        assert_is(batch, expected)
        starts = chosen(batch, "next_sentence").positions[: batch.local_counts.sequences]
        assert (batch.position_ids[starts] == 0).all()
        of_sources = np.repeat(packs.sources, packs.sizes)
        assert batch.source_tokens == tuple(int(packs.lengths[of_sources == index].sum()) for index in (0, 1))
