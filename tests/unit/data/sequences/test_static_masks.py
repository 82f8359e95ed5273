"""Masks that are stored with the pairs, any number per pair: their batches and errors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from collated import batches_of, collator_of, planner_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_sources import (
    REDUCTIONS,
    VOCABULARY_SIZE,
    Pair,
    TokensInMemory,
    masked_objective,
    pair_source,
    random_halves,
    random_sentence_pairs,
    with_own_masks,
)
from step_shapes import step_shape

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.data.batches.objectives import Objective, StoredMasks
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.order.step_shape import Layout, StepShape
from evenpack.data.recipes import MaskedPairsRecipe
from evenpack.data.sequences import MaskedPairsView, TokenAccounting
from evenpack.data.sequences.pairs import most_masks_by_length
from evenpack.errors import ConfigError, DataError
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE

LONGEST = 40
PACK_LENGTH = 64
PACKS_PER_STEP = 8
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")
OF_TOKENS = ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Two sources, and the stored masks of each sequence."""

    sources: list[PackedSource]
    pairs: list[list[Pair]]
    masks: list[list[dict[int, int]]]


def stored(seed: int = 1, *, counts: Sequence[int] = (30, 20)) -> Stored:
    pairs, masks = [], []
    for index, count in enumerate(counts):
        made = random_sentence_pairs(random_halves(count, longest=LONGEST, seed=seed + index), seed=seed + index)
        seen, of_source = with_own_masks(made, seed=seed + index)
        pairs.append(seen)
        masks.append(of_source)
    sources = [
        pair_source(seen, pack_length=PACK_LENGTH, longest=LONGEST, key=21 + index, masks=masks[index])
        for index, seen in enumerate(pairs)
    ]
    return Stored(sources=sources, pairs=pairs, masks=masks)


def objective(reduction: str = "token", vocabulary_size: int = VOCABULARY_SIZE) -> StoredMasks:
    return StoredMasks(
        vocabulary_size=vocabulary_size,
        masked_token=replace(MASKED_TOKEN, divided_by=REDUCTIONS[reduction]),
        next_sentence=NEXT_SENTENCE,
    )


Division = tuple[int, int]
"""Ranks, and micro-batches of each."""


def shape_of(division: Division = (1, 1), layout: Layout = "packed") -> StepShape:
    packs = PACKS_PER_STEP // (division[0] * division[1])
    return step_shape(items_per_step=PACKS_PER_STEP, items_per_micro_batch=packs, layout=layout)


def batches(
    data: Stored, asked: Objective, step: int, division: Division = (1, 1), layout: Layout = "packed"
) -> list[tuple[PackSelection, PackedBatch]]:
    shape = shape_of(division, layout)
    sizes = {"pack_length": PACK_LENGTH, "padding_token": 1, "vocabulary_size": VOCABULARY_SIZE}
    collator = collator_of(data.sources, shape, asked, **sizes)
    return batches_of(planner_of(data.sources, shape, asked, ranks=division[0]), collator, step)


def chosen(batch: PackedBatch, loss: str) -> ChosenTargets:
    targets = batch.targets[loss]
    assert isinstance(targets, ChosenTargets)
    return targets


def assert_holds(batch: PackedBatch, packs: PackSelection, data: Stored, reduction: str) -> None:
    """Checks that each sequence's slots hold its stored masks, and nothing else."""
    targets, pairs, expected = chosen(batch, "masked_token"), chosen(batch, "next_sentence"), []
    sources = np.repeat(packs.sources, np.diff(packs.offsets))
    for number, (source, sequence) in enumerate(zip(sources, packs.sequence_ids.tolist(), strict=True)):
        pair, masks = data.pairs[source][sequence], data.masks[source][sequence]
        start = int(pairs.positions[number])
        assert batch.tokens[start : start + len(pair.tokens)].tolist() == pair.tokens
        assert int(pairs.labels[number]) == pair.label
        weight = 1.0 if reduction == "token" else 1.0 / max(len(masks), 1)
        expected += [(start + place, label, np.float32(weight)) for place, label in masks.items()]
    count = len(expected)
    arrays = (targets.positions, targets.labels, targets.weights)
    assert list(zip(*(array[:count].tolist() for array in arrays), strict=True)) == expected
    assert not any(array[count:].any() for array in arrays)
    assert batch.local_counts.targets == count


def test_the_masks_of_these_tests_are_no_function_of_the_length() -> None:
    data = stored()
    counts_of_lengths: dict[int, set[int]] = {}
    for pair, masks in zip(data.pairs[0], data.masks[0], strict=True):
        counts_of_lengths.setdefault(len(pair.tokens), set()).add(len(masks))
    assert max(map(len, counts_of_lengths.values())) > 1
    assert {0} < {len(masks) for masks in data.masks[0]}


@given(
    seed=st.integers(0, 1000),
    layout=st.sampled_from(LAYOUTS),
    reduction=st.sampled_from(OF_TOKENS),
    division=st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 1), (2, 4)]),
    step=st.integers(0, 9),
)
@settings(max_examples=60)
def test_every_batch_holds_what_is_stored_and_the_plan_counts_it(
    *, seed: int, layout: Layout, reduction: str, division: tuple[int, int], step: int
) -> None:
    """It holds over epochs, however a step is divided and laid out."""
    data = stored(seed)
    for packs, batch in batches(data, objective(reduction), step, division, layout):
        assert_holds(batch, packs, data, reduction)


def three_sequences(**changes: np.ndarray) -> MaskedPairsView:
    arrays: dict[str, np.ndarray] = {
        "mask_offsets": np.array([0, 2, 2, 5], dtype=np.int64),
        "mask_positions": np.array([1, 4, 2, 3, 5], dtype=np.uint16),
        "mask_labels": np.array([11, 14, 22, 23, 25], dtype=np.int32),
        "most_masks": np.array([0, 0, 0, 0, 0, 2, 3], dtype=np.uint16),
    }
    return MaskedPairsView(
        recipe=MaskedPairsRecipe(kind="masked_pairs", max_sequence_length=6),
        token_file=TokensInMemory([range(5), range(5), range(6)]),
        accounting=TokenAccounting(documents_read=3, documents_kept=3, tokens_read=16, tokens_kept=16, sequences=3),
        max_segments_per_sequence=1,
        directory=None,
        first_segment_lengths=np.array([3, 3, 3], dtype=np.uint16),
        next_sentence_labels=np.zeros(3, dtype=np.uint8),
        **{**arrays, **changes},
    )


def test_the_greatest_count_of_each_length_is_found_chunk_by_chunk() -> None:
    lengths, offsets = np.array([5, 5, 6, 2, 6]), np.array([0, 2, 2, 5, 5, 9])
    for chunks in ([lengths], [lengths[:2], lengths[2:]], list(lengths[:, None])):
        assert most_masks_by_length(offsets, iter(chunks), longest=7).tolist() == [0, 0, 0, 0, 0, 2, 4, 0]


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("mask_positions", 4, 6, "mask_positions has a mask at position 6 of sequence 2, beyond its end"),
        ("mask_offsets", 1, 3, "mask_offsets gives sequence 0 of 5 tokens 3 masks, and most_masks allows 0 to 2"),
        ("mask_offsets", 2, 1, "mask_offsets gives sequence 1 of 5 tokens -1 masks, and most_masks allows 0 to 2"),
        ("most_masks", 6, 2, "mask_offsets gives sequence 2 of 6 tokens 3 masks, and most_masks allows 0 to 2"),
    ],
)
def test_damage_is_named(name: str, place: int, value: int, message: str) -> None:
    array = getattr(three_sequences(), name).copy()
    array[place] = value
    with pytest.raises(DataError, match=message):
        three_sequences(**{name: array}).read(np.arange(3))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("mask_labels", np.zeros(4, dtype=np.int32), "5 positions, 4 labels, offsets from 0 to 5"),
        ("mask_positions", np.zeros(4, dtype=np.uint16), "4 positions, 5 labels, offsets from 0 to 5"),
        ("mask_offsets", np.array([1, 2, 2, 5]), "offsets from 1 to 5"),
        ("mask_offsets", np.zeros(0, dtype=np.int64), "are of -1 sequences of up to 6 tokens, expected 3 of up to 6"),
        ("most_masks", np.zeros(6, dtype=np.uint16), "are of 3 sequences of up to 5 tokens, expected 3 of up to 6"),
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(name: str, array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        three_sequences(**{name: array})


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    pairs = random_sentence_pairs([(4, 5)] * 4, seed=1)
    source = pair_source(pairs, pack_length=PACK_LENGTH, longest=LONGEST, masks=[{1: VOCABULARY_SIZE}] * 4)
    with pytest.raises(DataError, match=r"mask_labels has token id 90 for sequence .* has 90 entries"):
        batches(Stored(sources=[source], pairs=[pairs], masks=[]), objective(), 0)


def test_masks_are_neither_drawn_over_stored_ones_nor_sought_where_there_are_none() -> None:
    plain = pair_source(random_sentence_pairs([(5, 5)], seed=1), pack_length=PACK_LENGTH, longest=LONGEST)
    for sources, asked, message in (
        (stored().sources, masked_objective(), "would be masked again in each epoch"),
        ([plain], objective(), "were prepared without masks"),
    ):
        with pytest.raises(ConfigError, match=message):
            collator_of(sources, step_shape(), asked, pack_length=PACK_LENGTH)
