"""Packs of sentence pairs become batches whose arrays agree with the pairs one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_sources import (
    VOCABULARY_SIZE,
    Pair,
    masked_objective,
    pair_source,
    random_halves,
    random_sentence_pairs,
)
from step_shapes import step_shape

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import DynamicMasks
from evenpack.data.order.selection import PackedSource, PackSelection, select_packs
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import UNPADDED_SLOT_MULTIPLE, Layout
from evenpack.data.sequences.masking import mask_sequences, masked_count, masking_keys
from evenpack.losses import StepCounts

PADDING_TOKEN = 1
"""No pair holds it."""
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")
COUNTS = StepCounts(packs=1, sequences=1, tokens=1, targets=1)
LONGEST = 40

halves = st.tuples(st.integers(1, 18), st.integers(1, 19))


def planner(
    sources: Sequence[PackedSource],
    objective: DynamicMasks,
    *,
    packs: int,
    ranks: int = 1,
    micro_batches: int = 1,
    weights: Sequence[int] | None = None,
) -> StepPlanner:
    shape = step_shape(items_per_step=packs, items_per_micro_batch=packs // (ranks * micro_batches))
    return StepPlanner(sources, weights or [1] * len(sources), shape=shape, ranks=ranks, objective=objective)


def collator(
    sources: Sequence[PackedSource],
    objective: DynamicMasks,
    *,
    rows: int,
    pack_length: int,
    layout: Layout = "packed",
) -> Collator:
    return Collator(
        sources,
        shape=step_shape(layout=layout, items_per_micro_batch=rows),
        objective=objective,
        pack_length=pack_length,
        padding_token=PADDING_TOKEN,
        vocabulary_size=VOCABULARY_SIZE,
    )


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
    epoch=st.integers(0, 3),
)
@settings(deadline=None, max_examples=120)
def test_every_array_is_that_of_the_pairs_one_by_one(
    *,
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    layout: Layout,
    reduction: str,
    pack_length: int,
    whole_words: bool,
    epoch: int,
) -> None:
    pairs = [random_sentence_pairs(first, seed=1), random_sentence_pairs(second, seed=2)]
    sources = [
        pair_source(of_one, pack_length=pack_length, longest=LONGEST, key=11 + index)
        for index, of_one in enumerate(pairs)
    ]
    objective = masked_objective(reduction=reduction, whole_words=whole_words)
    of_first = np.arange(3) + epoch * sources[0].plan.packs
    packs = select_packs(sources, np.array([0, 1, 0, 0]), np.array([of_first[0], 2 + epoch, of_first[1], of_first[2]]))
    rows = 5
    one = collator(sources, objective, rows=rows, pack_length=pack_length, layout=layout)
    batch = one.collate(packs, COUNTS)
    assert_is(batch, expect(packs, sources, pairs, objective, layout=layout, rows=rows, pack_length=pack_length))
    starts = chosen(batch, "next_sentence").positions[: batch.local_counts.sequences]
    assert (batch.position_ids[starts] == 0).all()


def many_pairs(count: int, *, seed: int) -> list[Pair]:
    return random_sentence_pairs(random_halves(count, longest=LONGEST, seed=seed), seed=seed)


def test_arrays_of_targets_are_rounded_up() -> None:
    """Three pairs of 13, 13 and 14 tokens have 2 + 2 + 2 targets, as many as two of 40; 18 are rounded up to 64."""
    halves_of_packs = [(5, 5), (5, 5), (5, 6), (30, 7), (30, 7)]
    source = pair_source(random_sentence_pairs(halves_of_packs, seed=3), pack_length=40, longest=LONGEST)
    objective = masked_objective()
    counts = masked_count(source.view.lengths().astype(np.int64), objective.masking)
    assert counts.tolist() == [2, 2, 2, 6, 6]
    everything = planner([source], objective, packs=3).plan(0).packs
    targets_of_packs = np.add.reduceat(counts[everything.sequence_ids], everything.offsets[:-1])
    assert targets_of_packs.tolist() == [6, 6, 6]
    batch = collator([source], objective, rows=3, pack_length=40).collate(everything, COUNTS)
    assert batch.local_counts.targets == 18
    assert chosen(batch, "masked_token").weights.tolist() == [1.0] * 18 + [0.0] * 46


PACKS_PER_STEP = 8

Masks = dict[tuple[int, int, int], tuple[list[int], list[tuple[int, int]]]]
"""By source key, epoch and sequence: what the model sees, and (position, label) of what is masked."""


def masks_of_steps(
    sources: Sequence[PackedSource],
    objective: DynamicMasks,
    steps: range,
    *,
    layout: Layout = "packed",
    ranks: int = 1,
    micro_batches: int = 1,
    weights: Sequence[int] | None = None,
) -> Masks:
    """Reads masks from batches, and checks that the counts of each step are the sums of its batches."""
    one = collator(
        sources,
        objective,
        rows=PACKS_PER_STEP // (ranks * micro_batches),
        pack_length=64,
        layout=layout,
    )
    planned = planner(
        sources, objective, packs=PACKS_PER_STEP, ranks=ranks, micro_batches=micro_batches, weights=weights
    )
    masks: Masks = {}
    for step in steps:
        plan = planned.plan(step)
        total = StepCounts(packs=0, sequences=0, tokens=0, targets=0)
        for rank in range(ranks):
            for index in range(micro_batches):
                packs = plan.micro_batch(rank, index)
                batch = one.collate(packs, plan.counts)
                assert batch.step_counts == plan.counts
                total += batch.local_counts
                masks |= masks_of_batch(batch, packs, sources)
        assert total == plan.counts
    return masks


def masks_of_batch(batch: PackedBatch, packs: PackSelection, sources: Sequence[PackedSource]) -> Masks:
    sizes = np.diff(packs.offsets)
    epochs = [
        int(position) // sources[source].plan.packs
        for source, position in zip(packs.sources, packs.stream_positions, strict=True)
    ]
    names = zip(
        np.repeat([sources[source].key for source in packs.sources], sizes).tolist(),
        np.repeat(epochs, sizes).tolist(),
        packs.sequence_ids.tolist(),
        strict=True,
    )
    masks: Masks = {}
    targets = found_targets(batch)
    for name, (start, _), length in zip(names, found_sequences(batch), packs.lengths.tolist(), strict=True):
        own = [(slot - start, label) for slot, label, _ in targets if start <= slot < start + length]
        masks[name] = (batch.tokens[start : start + length].tolist(), own)
    return masks


def two_sources() -> list[PackedSource]:
    return [
        pair_source(many_pairs(30, seed=5), pack_length=64, longest=LONGEST, key=21),
        pair_source(many_pairs(20, seed=6), pack_length=64, longest=LONGEST, key=22),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_masks_are_the_same_however_a_step_is_divided_and_laid_out(
    layout: Layout, ranks: int, micro_batches: int
) -> None:
    sources, steps = two_sources(), range(2, 7)
    alone = masks_of_steps(sources, masked_objective(), steps)
    assert len(alone) > 50
    divided = masks_of_steps(
        sources, masked_objective(), steps, layout=layout, ranks=ranks, micro_batches=micro_batches
    )
    assert divided == alone


def test_a_source_named_elsewhere_in_the_run_file_keeps_its_masks() -> None:
    one, two = two_sources()
    in_order = masks_of_steps([one, two], masked_objective(), range(4))
    swapped = masks_of_steps([two, one], masked_objective(), range(4))
    both = in_order.keys() & swapped.keys()
    assert {name[0] for name in both} == {21, 22}
    assert all(in_order[name] == swapped[name] for name in both)
