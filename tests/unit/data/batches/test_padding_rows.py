"""Padding in rows of the recipe `padding` is not counted as tokens, and is not a target if the recipe excludes it."""

import numpy as np
import pytest
from collated import batches_of, collator_of, planner_of
from step_shapes import step_shape
from token_files import END, left_out_of, numbered_tokens

from evenpack.batch import SlotTargets
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_shape import CostWeights
from evenpack.data.order.stored_plan import SequentialPlan
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.recipes import EndOfText, PaddingRecipe
from evenpack.data.sequences import build_view
from evenpack.data.tokens.file import TokenFile
from evenpack.models.cost import performed_work, useful_work
from evenpack.visible_pairs import total_pairs_within

ROW = 8
LENGTHS = [4, 9, 30, 8, 3, 17, 12]


SHAPE = step_shape(
    items_per_step=4,
    items_per_micro_batch=2,
    cost_weights=CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0),
    windows=(3,),
)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return numbered_tokens(tmp_path_factory.mktemp("rows") / "tokens", LENGTHS)


def source_of(token_file: TokenFile, *, atom: int, isolate: bool, predicted: EndOfText) -> PackedSource:
    recipe = PaddingRecipe(
        kind="padding",
        max_sequence_length=ROW,
        atom=atom,
        isolate_documents=isolate,
        pad_tails_to="atom",
        end_of_text_in_loss=predicted,
    )
    view = build_view(recipe, token_file, np.arange(len(LENGTHS)))
    packing = pack(LengthHistogram.from_lengths(view.lengths(), longest=ROW), pack_length=ROW)
    return PackedSource(view=view, plan=SequentialPlan(packing), key=3)


@pytest.mark.parametrize("atom", [4, 8, 16])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("predicted", ["all", "closing"])
def test_the_plan_counts_what_the_batches_hold(
    token_file: TokenFile, atom: int, isolate: bool, predicted: EndOfText
) -> None:
    source = source_of(token_file, atom=atom, isolate=isolate, predicted=predicted)
    planner = planner_of([source], SHAPE)
    collator = collator_of([source], SHAPE, pack_length=ROW, padding_token=END)
    for step in range(5):
        for _, batch in batches_of(planner, collator, step):
            ids = batch.sequence_ids[batch.sequence_ids >= 0].numpy()
            padding = padding_of(source, ids)
            assert batch.local_counts.tokens == int((~padding).sum()) == batch.source_tokens[0]
            assert isinstance(batch.targets["next_token"], SlotTargets)
            assert int(batch.targets["next_token"].weights.sum()) == batch.local_counts.targets
            assert batch.local_counts.targets == expected_targets(source, ids, in_loss=predicted == "all")
            of_real_tokens = expected_targets(source, ids, in_loss=False)
            assert useful_work(batch).head_slots == batch.local_counts.real_targets == of_real_tokens
            real = np.array(real_lengths(source, ids))
            assert useful_work(batch).squared_lengths == (real**2).sum()
            assert useful_work(batch).pairs_within == total_pairs_within(real, (3,))
            all_lengths = batch.cu_seqlens.diff().numpy()
            assert performed_work(batch).pairs_within == total_pairs_within(all_lengths, (3,))
        plan = planner.plan(step)
        assert sum(plan.cost_of(0, index) for index in range(plan.micro_batches)) == pytest.approx(plan.cost(0))


def padding_of(source: PackedSource, rows: np.ndarray) -> np.ndarray:
    return left_out_of(source.view, rows, "closing")


def expected_targets(source: PackedSource, rows: np.ndarray, *, in_loss: bool) -> int:
    """Returns the targets: each slot but the first of its segment, without padding if it is left out."""
    targets = 0
    for row in rows:
        one = np.array([row])
        padding = padding_of(source, one)
        firsts = {0, *np.cumsum(source.view.read(one).counts.segment_lengths).tolist()}
        for slot, fills_up in enumerate(padding.tolist()):
            targets += slot not in firsts and (in_loss or not fills_up)
    return targets


def real_lengths(source: PackedSource, rows: np.ndarray) -> list[int]:
    """Returns the length of each segment without its padding."""
    lengths = source.view.read(rows).counts.segment_lengths
    return [int((~one).sum()) for one in np.split(padding_of(source, rows), np.cumsum(lengths)[:-1])]
