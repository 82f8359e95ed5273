"""An objective accepts the sequences that it is for, and counts the targets that it makes."""

from dataclasses import fields
from typing import Any, Literal

import numpy as np
import pytest
from pair_sources import TokensInMemory, masked_objective, pair_source, random_halves, random_sentence_pairs
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import DynamicMasks, NextTokens, Objective
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.order.step_shape import Layout
from evenpack.data.recipes import PaddingRecipe
from evenpack.data.sequences import SequenceCounts, build_view
from evenpack.data.sequences.masking import masked_count
from evenpack.errors import ConfigError
from evenpack.losses import StepCounts

PACK_LENGTH = 24
COUNTS = StepCounts(packs=1, sequences=1, tokens=1, targets=1)

DOCUMENTS = packed_source([[5, 3], [4], [9, 2, 1], [12], [7]], pack_length=PACK_LENGTH, longest=12)
PADDED_RECIPE = PaddingRecipe(kind="padding", max_sequence_length=12, atom=12)
PADDED_VIEW = build_view(PADDED_RECIPE, TokensInMemory([[5, 3, 2], [4, 7, 2]]), np.arange(2))
PADDED = PackedSource(view=PADDED_VIEW, plan=DOCUMENTS.plan, key=1)
PAIRS = pair_source(
    random_sentence_pairs(random_halves(12, longest=20, seed=1), seed=1), pack_length=PACK_LENGTH, longest=20
)


def collate(source: PackedSource, objective: Objective, **shape: Any) -> PackedBatch:
    """Collates two packs in three rows."""
    packs = select_packs([source], np.zeros(2, dtype=np.int64), np.arange(2))
    collator = Collator(
        [source],
        shape=step_shape(items_per_micro_batch=3, **shape),
        objective=objective,
        pack_length=PACK_LENGTH,
        padding_token=0,
        vocabulary_size=1_000_000,
    )
    return collator.collate(packs, COUNTS)


def assert_same_targets(found: PackedBatch, expected: PackedBatch) -> None:
    assert list(found.targets) == list(expected.targets)
    for targets, others in zip(found.targets.values(), expected.targets.values(), strict=True):
        for field in fields(others):
            assert getattr(targets, field.name).tolist() == getattr(others, field.name).tolist()


@pytest.mark.parametrize(
    ("source", "objective", "message"),
    [
        (PAIRS, NextTokens(), "sentence_pairs .* are for models of masked tokens"),
        (
            PackedSource(view=PADDED_VIEW, plan=DOCUMENTS.plan, key=1),
            masked_objective(),
            "recipe.kind padding pads sequences with end-of-text",
        ),
    ],
)
def test_sequences_of_another_kind_are_refused_with_what_to_do(
    source: PackedSource, objective: Objective, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        collate(source, objective)


@pytest.mark.parametrize(("isolate", "reset_positions"), [(False, True), (True, False), (False, False)])
def test_switches_for_study_leave_next_tokens_as_they_are(isolate: bool, reset_positions: bool) -> None:
    plain = collate(DOCUMENTS, NextTokens())
    other = collate(DOCUMENTS, NextTokens(), isolate=isolate, reset_positions=reset_positions)
    assert other.tokens.tolist() == plain.tokens.tolist()
    assert_same_targets(other, plain)
    assert other.local_counts == plain.local_counts


@pytest.mark.parametrize(("isolate", "reset_positions"), [(False, True), (True, False), (False, False)])
def test_switches_for_study_leave_masks_as_they_are(isolate: bool, reset_positions: bool) -> None:
    plain = collate(PAIRS, masked_objective())
    other = collate(PAIRS, masked_objective(), isolate=isolate, reset_positions=reset_positions)
    assert other.tokens.tolist() == plain.tokens.tolist()
    assert other.token_type_ids.tolist() == plain.token_type_ids.tolist()
    assert_same_targets(other, plain)
    rows = PACK_LENGTH if not reset_positions else 20
    assert other.position_rows == rows
    assert other.max_sequence_length == (20 if isolate else PACK_LENGTH)


def test_next_tokens_are_as_many_as_tokens_but_one_a_segment() -> None:
    ids = np.arange(3)
    counts = DOCUMENTS.view.counts(ids, DOCUMENTS.view.lengths()[ids])
    assert NextTokens().count_targets(DOCUMENTS.view, ids, counts).tolist() == [6, 3, 9]


@pytest.mark.parametrize("settings", [{}, {"share": 0.5, "max_predictions": 4}])
def test_masked_tokens_depend_on_the_length_alone(settings: dict[Literal["share", "max_predictions"], float]) -> None:
    objective = masked_objective(**settings)
    lengths = np.arange(3, 30)
    given = SequenceCounts.of_single_segments(lengths)
    counts = objective.count_targets(PAIRS.view, np.arange(len(lengths)), given)
    assert counts.tolist() == masked_count(lengths, objective.masking).tolist()
    assert counts[0] == 0, "three special tokens leave nothing to mask"
    assert len(set(counts.tolist())) > 3


def test_a_pair_without_ordinary_tokens_has_no_target_and_counts_as_a_sequence() -> None:
    pairs = random_sentence_pairs([(0, 0), (3, 4)], seed=1)
    source = pair_source(pairs, pack_length=PACK_LENGTH, longest=20)
    for reduction, weight in (("token", 1.0), ("sequence", 0.5)):
        batch = collate(source, masked_objective(reduction=reduction))
        assert batch.local_counts.sequences == 4, "a pack of both, in two epochs"
        assert batch.local_counts.targets == 4, "two of ten tokens"
        assert batch.targets["masked_token"].weights[:4].tolist() == [weight] * 4


@pytest.mark.parametrize("layout", ["packed", "unpadded", "padded"])
def test_the_next_sentence_losses_of_each_pack_can_weigh_the_same_in_sum(layout: Layout) -> None:
    pairs = random_sentence_pairs([(1, 1), (1, 2), (9, 8), (2, 1)], seed=1)
    source = pair_source(pairs, pack_length=PACK_LENGTH, longest=20)
    objective = masked_objective(next_sentence_reduction="pack")
    batch = collate(source, objective, layout=layout)
    drawn = source.plan.draw(np.arange(batch.local_counts.packs))
    sizes = np.diff(drawn.offsets)
    assert len(set(sizes.tolist())) > 1, "packs of different depths"
    weights = batch.targets["next_sentence"].weights[: batch.local_counts.sequences].numpy()
    np.testing.assert_allclose(weights, 1.0 / np.repeat(sizes, sizes))
    assert weights.sum() == pytest.approx(batch.local_counts.packs)
    judged = collate(source, objective.for_validation(), layout=layout)
    assert (
        judged.targets["next_sentence"].weights.tolist()
        == (batch.targets["next_sentence"].weights > 0).float().tolist()
    )


def test_validation_reduces_and_masks_as_training_does_with_a_fixed_seed() -> None:
    objective = masked_objective(seed=9, reduction="sequence", share=0.3)
    fixed = objective.for_validation()
    assert isinstance(fixed, DynamicMasks)
    assert (fixed.masking, fixed.vocabulary) == (objective.masking, objective.vocabulary)
    assert fixed.masked_token.divided_by == "sequences"
    assert fixed.seed == masked_objective(seed=10).for_validation().seed
    assert NextTokens().for_validation() == NextTokens()
