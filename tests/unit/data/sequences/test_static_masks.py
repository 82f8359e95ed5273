"""Masks that are stored with the pairs, any number per pair: their batches, losses and errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_batches import MaskedPair, build_masked_batch, roughen
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
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import Objective, StoredMasks
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import Layout
from evenpack.data.recipes import MaskedPairsRecipe
from evenpack.data.sequences import MaskedPairsView, TokenAccounting
from evenpack.data.sequences.pairs import most_masks_by_length
from evenpack.errors import ConfigError, DataError
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, StepCounts
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common.loss_sums import exact_denominators, scaled_loss

LONGEST = 40
PACK_LENGTH = 64
PACKS_PER_STEP = 8
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")
OF_TOKENS = ("token", "sequence")
COUNTS = StepCounts(packs=1, sequences=1, tokens=1, targets=1)


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


def planner(
    sources: Sequence[PackedSource], asked: Objective, *, ranks: int = 1, micro_batches: int = 1
) -> StepPlanner:
    shape = step_shape(items_per_step=PACKS_PER_STEP, items_per_micro_batch=PACKS_PER_STEP // (ranks * micro_batches))
    return StepPlanner(sources, [1] * len(sources), shape=shape, ranks=ranks, objective=asked)


def collator(sources: Sequence[PackedSource], asked: Objective, *, rows: int, layout: Layout = "packed") -> Collator:
    return Collator(
        sources,
        shape=step_shape(layout=layout, items_per_micro_batch=rows),
        objective=asked,
        pack_length=PACK_LENGTH,
        padding_token=1,
        vocabulary_size=VOCABULARY_SIZE,
    )


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
@settings(deadline=None, max_examples=60)
def test_every_batch_holds_what_is_stored_and_the_plan_counts_it(
    *, seed: int, layout: Layout, reduction: str, division: tuple[int, int], step: int
) -> None:
    """It holds over epochs, however a step is divided and laid out."""
    data, (ranks, micro_batches) = stored(seed), division
    asked = objective(reduction)
    plan = planner(data.sources, asked, ranks=ranks, micro_batches=micro_batches).plan(step)
    one = collator(data.sources, asked, rows=PACKS_PER_STEP // (ranks * micro_batches), layout=layout)
    total = StepCounts(packs=0, sequences=0, tokens=0, targets=0)
    for rank in range(ranks):
        for index in range(micro_batches):
            packs = plan.micro_batch(rank, index)
            batch = one.collate(packs, plan.counts)
            assert_holds(batch, packs, data, reduction)
            total += batch.local_counts
    assert total == plan.counts
    sources = np.repeat(plan.packs.sources, np.diff(plan.packs.offsets))
    assert plan.counts.targets == sum(
        len(data.masks[source][sequence]) for source, sequence in zip(sources, plan.packs.sequence_ids, strict=True)
    )


def test_arrays_have_room_for_the_fullest_sequences_to_meet() -> None:
    """Four pairs of 12 tokens in two packs, two of them with 9 masks: in some epochs these two share a pack."""
    nine = dict.fromkeys((1, 2, 3, 4, 6, 7, 8, 9, 10), 9)
    source = pair_source(
        random_sentence_pairs([(4, 5)] * 4, seed=1), pack_length=24, longest=20, masks=[nine, {1: 9}, {}, nine]
    )
    one = collator([source], objective(), rows=1)
    found = []
    for step in range(4):
        packs = planner([source], objective()).plan(step).packs
        for index in range(packs.packs):
            found.append(one.collate(packs.take(np.array([index])), COUNTS).local_counts.targets)
    assert max(found) == 18
    assert min(found) < 10


def test_the_plan_alone_decides_the_masks_and_no_seed_does() -> None:
    data = stored()
    assert objective().for_validation() == objective()
    every = planner(data.sources, objective()).plan(3)
    assert every.counts.targets == planner(data.sources, objective("sequence")).plan(3).counts.targets


def bert(reduction: str) -> Bert:
    config = BertConfig(
        kind="bert",
        preset="tiny",
        hidden_size=32,
        heads=2,
        dropout=0.0,
        mlm_reduction=reduction,  # type: ignore[arg-type]
    )
    model = Bert(config, vocabulary_size=VOCABULARY_SIZE, max_positions=LONGEST, seed=2)
    roughen(model)
    return model


def loss_and_gradient(model: Bert, batches: Sequence[PackedBatch], counts: StepCounts) -> tuple[float, torch.Tensor]:
    """Returns loss and gradient of a step, divided by its own counts."""
    model.zero_grad()
    loss = 0.0
    for batch in batches:
        part = scaled_loss(model(batch), exact_denominators(model.config.losses, counts), world_size=1, accumulation=1)
        part.backward()
        loss += part.item()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return loss, torch.cat([gradient.flatten() for gradient in gradients]).clone()


def one_by_one(model: Bert, packs: PackSelection, data: Stored, reduction: str) -> tuple[float, torch.Tensor]:
    """Returns the mean loss by definition, pair by pair; one without a mask adds nothing and is still counted."""
    token_losses, pair_losses, counts = [], [], []
    sources = np.repeat(packs.sources, np.diff(packs.offsets))
    for source, sequence in zip(sources, packs.sequence_ids.tolist(), strict=True):
        pair, masks = data.pairs[source][sequence], data.masks[source][sequence]
        types = [0] * pair.first_length + [1] * (len(pair.tokens) - pair.first_length)
        alone = MaskedPair(tokens=pair.tokens, token_types=types, masked=masks, next_sentence_label=pair.label)
        sums = model(build_masked_batch([[alone]], "unpadded", max_sequence_length=LONGEST)[0])
        token_losses.append(sums["masked_token"].loss_sum)
        pair_losses.append(sums["next_sentence"].loss_sum)
        counts.append(float(len(masks)))
    losses, divisors = torch.stack(token_losses), torch.tensor(counts)
    assert (divisors == 0).any()
    mean = losses.sum() / divisors.sum() if reduction == "token" else (losses / divisors.clamp(min=1)).mean()
    loss = mean + torch.stack(pair_losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("reduction", OF_TOKENS)
def test_layouts_and_divisions_have_the_loss_of_the_pairs_one_by_one(reduction: str) -> None:
    data, asked, model = stored(), objective(reduction), bert(reduction)
    expected, gradient = one_by_one(model, planner(data.sources, asked).plan(2).packs, data, reduction)
    for layout in LAYOUTS:
        for ranks, micro_batches in ((1, 1), (2, 2)):
            plan = planner(data.sources, asked, ranks=ranks, micro_batches=micro_batches).plan(2)
            one = collator(data.sources, asked, rows=PACKS_PER_STEP // (ranks * micro_batches), layout=layout)
            batches = [
                one.collate(plan.micro_batch(rank, index), plan.counts)
                for rank in range(ranks)
                for index in range(micro_batches)
            ]
            loss, found = loss_and_gradient(model, batches, plan.counts)
            assert loss == pytest.approx(expected, rel=1e-5)
            assert (found - gradient).norm() <= 1e-5 * gradient.norm()


def test_both_reductions_differ() -> None:
    data = stored()
    packs = planner(data.sources, objective()).plan(2).packs
    by_token, by_sequence = (one_by_one(bert("token"), packs, data, reduction)[0] for reduction in OF_TOKENS)
    assert abs(by_token - by_sequence) > 1e-3


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


def test_stored_masks_come_back_for_any_sequences_in_any_order() -> None:
    view, ids, lengths = three_sequences(), np.array([2, 0, 1, 2]), np.array([6, 5, 5, 6])
    assert view.counts(ids, lengths).targets.tolist() == [3, 2, 0, 3]
    content = view.read(ids)
    assert content.counts.targets.tolist() == [3, 2, 0, 3]
    assert content.mask_places is not None
    assert content.mask_labels is not None
    assert content.mask_places.tolist() == [2, 3, 5, 1, 4, 2, 3, 5]
    assert content.mask_labels.tolist() == [22, 23, 25, 11, 14, 22, 23, 25]


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
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(name: str, array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        three_sequences(**{name: array})


def masked_view(source: PackedSource, **changes: np.ndarray) -> MaskedPairsView:
    values: Mapping[str, object] = {field.name: getattr(source.view, field.name) for field in fields(MaskedPairsView)}
    return MaskedPairsView(**{**values, **changes})  # type: ignore[arg-type]


def test_masks_of_other_pairs_are_refused_before_a_batch_is_made() -> None:
    source = stored().sources[0]
    most, offsets = source.view.most_masks, source.view.mask_offsets  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"are of 31 sequences of up to 40 tokens, expected 30 of up to 40"):
        masked_view(source, mask_offsets=np.append(offsets, offsets[-1]))
    with pytest.raises(DataError, match=r"are of 30 sequences of up to 39 tokens, expected 30 of up to 40"):
        masked_view(source, most_masks=most[:-1])


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    pairs = random_sentence_pairs([(4, 5)] * 4, seed=1)
    source = pair_source(pairs, pack_length=PACK_LENGTH, longest=LONGEST, masks=[{1: VOCABULARY_SIZE}] * 4)
    packs = planner([source], objective()).plan(0).packs
    with pytest.raises(DataError, match=r"mask_labels has token id 90 for sequence .* has 90 entries"):
        collator([source], objective(), rows=PACKS_PER_STEP).collate(packs, COUNTS)


def test_masks_are_neither_drawn_over_stored_ones_nor_sought_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="would be masked again in each epoch"):
        collator(stored().sources, masked_objective(), rows=1)
    plain = pair_source(random_sentence_pairs([(5, 5)], seed=1), pack_length=PACK_LENGTH, longest=LONGEST)
    with pytest.raises(ConfigError, match="were prepared without masks"):
        collator([plain], objective(), rows=1)
