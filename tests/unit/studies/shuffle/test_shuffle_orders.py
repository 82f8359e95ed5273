"""Orders and their figures, in cases whose figures are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.order.blocked_plan import BlockedPlan, Blocks
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import LengthHistogram, pack
from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.study import (
    Order,
    borders,
    buffer_order,
    corpus_order,
    drawn_order,
    jump,
    quality,
    window_distance,
)

SECTION = ShuffleSection(reference="permutation", stretches=20)
N = 4000


def permuted(seed: int) -> Order:
    return Order(positions=np.random.default_rng(seed).permutation(N), packs=np.arange(N) // 4)


def test_a_permutation_has_the_figures_of_chance() -> None:
    found = quality(permuted(1), np.arange(N) * 4 // N, SECTION, packs_per_step=8)
    assert found.displacement == pytest.approx(1 / 3, abs=0.01)
    assert found.pack_mates == pytest.approx(1 / 20, abs=0.01)
    assert found.step_mates == pytest.approx(1 / 20, abs=0.005)
    assert found.window_distance < 0.06


def test_the_order_of_the_corpus_has_neighbours_alone() -> None:
    order = corpus_order(np.full(N, 32), pack_length=128)
    found = quality(order, np.arange(N) * 4 // N, SECTION, packs_per_step=5)
    assert (found.displacement, found.pack_mates, found.step_mates) == (0.0, 1.0, 1.0)
    assert found.window_distance == pytest.approx(0.75)


def test_pack_mates_and_step_mates_are_distinguished() -> None:
    """Packs of neighbours in random order; then packs of strangers whose steps are of neighbours."""
    packs = np.random.default_rng(0).permutation(N // 4)
    neighbours = Order(positions=(packs[:, None] * 4 + np.arange(4)).ravel(), packs=np.arange(N) // 4)
    found = quality(neighbours, np.zeros(N, dtype=np.int64), SECTION, packs_per_step=8)
    assert found.pack_mates == 1.0
    assert found.step_mates == pytest.approx(1 / 20, abs=0.02)
    single = Order(positions=np.arange(N), packs=np.arange(N))
    found = quality(single, np.zeros(N, dtype=np.int64), SECTION, packs_per_step=10)
    assert found.pack_mates is None
    assert found.step_mates == 1.0


@given(count=st.integers(1, 200), buffer=st.integers(1, 60), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_rolling_buffer_gives_each_sequence_once_and_none_long_before_its_turn(
    count: int, buffer: int, seed: int
) -> None:
    order = buffer_order(np.full(count, 3), pack_length=9, buffer=buffer, seed=seed)
    assert sorted(order.positions.tolist()) == list(range(count))
    assert (order.positions - np.arange(count) < buffer).all()
    if buffer == 1:
        assert order.positions.tolist() == list(range(count))


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_the_order_of_the_corpus_closes_a_pack_only_where_the_next_sequence_does_not_fit(lengths: list[int]) -> None:
    array = np.array(lengths)
    packs = corpus_order(array, pack_length=10).packs
    sums = np.bincount(packs, weights=array)
    assert sums.max() <= 10
    firsts = array[np.flatnonzero(np.diff(packs)) + 1]
    assert (sums[:-1] + firsts > 10).all()
    assert packs.tolist() == sorted(packs.tolist())
    assert len(sums) == packs[-1] + 1


def plans() -> tuple[PackPlan, BlockedPlan]:
    lengths = np.random.default_rng(2).integers(1, 17, 600)
    parts = [lengths[a : a + 200] for a in (0, 200, 400)]
    histograms = [LengthHistogram.from_lengths(part, longest=16) for part in (lengths, *parts)]
    whole, *packings = (pack(one, "longest_pack_first", pack_length=16) for one in histograms)
    ids = [sort_by_length(part, histogram) for part, histogram in zip(parts, histograms[1:], strict=True)]
    blocked = BlockedPlan(Blocks.of(packings), np.concatenate(ids), key=3, shuffles_blocks=False)
    return PackPlan(whole, sort_by_length(lengths, histograms[0]), key=3), blocked


def test_the_order_of_a_plan_is_its_first_epoch_by_the_ids_of_the_corpus() -> None:
    plan, _ = plans()
    drawn = plan.draw(np.arange(plan.packs))
    order = drawn_order(plan, None)
    np.testing.assert_array_equal(order.positions, drawn.sequence_ids)
    np.testing.assert_array_equal(np.bincount(order.packs), np.diff(drawn.offsets))
    moved = np.random.default_rng(0).permutation(600).astype(np.int32)
    np.testing.assert_array_equal(drawn_order(plan, moved).positions, moved[drawn.sequence_ids])


def test_borders_are_the_first_steps_with_packs_of_a_further_block_alone() -> None:
    plan, blocked = plans()
    assert borders(plan, packs_per_step=7, steps=100) == []
    found = borders(blocked, packs_per_step=7, steps=1000)
    drawn = blocked.draw(np.arange(blocked.packs))
    blocks = drawn.sequence_ids[drawn.offsets[:-1]] // 200
    first = [-(-int(np.argmax(blocks == block)) // 7) for block in (1, 2)]
    assert found == first
    assert borders(blocked, packs_per_step=7, steps=first[1]) == first[:1]


def test_a_jump_is_the_mean_behind_a_border_minus_that_before_it() -> None:
    losses = np.array([5.0, 4.0, 3.0, 6.0, 5.0, 4.0, 8.0, 7.0, 6.0])
    assert jump(losses, [3, 6], around=2) == pytest.approx(((6 + 5) / 2 - (4 + 3) / 2 + (8 + 7) / 2 - (5 + 4) / 2) / 2)
    assert jump(losses, [1, 8], around=2) is None
    assert jump(losses, [], around=2) is None


def test_the_distance_of_windows_is_that_of_the_one_that_is_most_unlike_the_whole() -> None:
    assert window_distance(np.array([0, 1] * 50), windows=10) == 0.0
    assert window_distance(np.repeat([0, 1], 50), windows=2) == 0.5
    assert window_distance(np.array([0] * 90 + [1] * 10), windows=10) == pytest.approx(0.9)
