"""An objective accepts the sequences that it is for, and counts the targets that it makes."""

from typing import Any

import numpy as np
import pytest
from collated import NEXT_TOKENS, collator_of
from pair_sources import TokensInMemory, masked_objective, pair_source, random_halves, random_sentence_pairs
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.batches.objectives import DynamicMasks, Objective
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.order.step_shape import Layout
from evenpack.data.recipes import PaddingRecipe
from evenpack.data.sequences import build_view
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


def collate(source: PackedSource, objective: Objective, **changes: Any) -> PackedBatch:
    """Collates two packs in three rows."""
    packs = select_packs([source], np.zeros(2, dtype=np.int64), np.arange(2))
    shape = step_shape(items_per_micro_batch=3, **changes)
    return collator_of([source], shape, objective, pack_length=PACK_LENGTH).collate(packs, COUNTS)


@pytest.mark.parametrize(
    ("source", "objective", "message"),
    [
        (PAIRS, NEXT_TOKENS, "sentence_pairs .* are for models of masked tokens"),
        (PADDED, masked_objective(), "recipe.kind padding pads sequences with end-of-text"),
    ],
)
def test_sequences_of_another_kind_are_refused_with_what_to_do(
    source: PackedSource, objective: Objective, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        collate(source, objective)


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
    assert NEXT_TOKENS.for_validation() == NEXT_TOKENS
