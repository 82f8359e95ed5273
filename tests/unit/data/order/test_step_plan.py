"""Step t is a pure function of (seed, t); ranks and accumulation only divide it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import packed_source
from step_shapes import step_shape

from evenpack.data.batches.objectives import NextTokens
from evenpack.data.order.selection import PackedSource, order_hash
from evenpack.data.order.step_plan import StepPlan, StepPlanner
from evenpack.data.order.step_shape import CostWeights
from evenpack.errors import ConfigError

PACKS_PER_STEP = 16


def many_sequences(count: int, seed: int) -> list[list[int]]:
    return [[int(length)] for length in np.random.default_rng(seed).integers(1, 33, size=count)]


def sources(key: int = 7) -> list[PackedSource]:
    return [
        packed_source(many_sequences(90, 1), pack_length=32, longest=32, key=key),
        packed_source(many_sequences(25, 2), pack_length=32, longest=32, key=key + 1),
    ]


def planner(ranks: int = 1, micro_batches: int = 1, *, per_micro_batch: bool = False, key: int = 7) -> StepPlanner:
    shape = step_shape(
        items_per_step=PACKS_PER_STEP,
        items_per_micro_batch=PACKS_PER_STEP // (ranks * micro_batches),
        balances_each_micro_batch=per_micro_batch,
    )
    return StepPlanner(sources(key), [3, 1], shape=shape, ranks=ranks, objective=NextTokens())


def content(plan: StepPlan) -> tuple[bytes, ...]:
    packs = plan.packs
    return tuple(
        array.tobytes() for array in (packs.sources, packs.stream_positions, packs.offsets, packs.sequence_ids)
    )


@pytest.mark.parametrize("per_micro_batch", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_ranks_and_accumulation_divide_a_step_without_changing_it(
    ranks: int, micro_batches: int, per_micro_batch: bool
) -> None:
    for step in (0, 3, 1_000_000):
        alone = planner().plan(step)
        divided = planner(ranks, micro_batches, per_micro_batch=per_micro_batch).plan(step)
        assert content(divided) == content(alone)
        assert divided.counts == alone.counts
        assert (np.diff(divided.assignment.offsets) == PACKS_PER_STEP // ranks // micro_batches).all()
        assert sorted(divided.assignment.items) == list(range(PACKS_PER_STEP))
        hashes = [
            order_hash(divided.micro_batch(rank, index)) for rank in range(ranks) for index in range(micro_batches)
        ]
        assert sum(hashes) % 2**64 == order_hash(alone.packs)


def test_steps_may_be_requested_in_any_order() -> None:
    one, other = planner(), planner()
    forward = [content(one.plan(step)) for step in range(8)]
    backward = [content(other.plan(step)) for step in reversed(range(8))]
    assert forward == backward[::-1]
    assert len(set(forward)) == len(forward)


def test_another_seed_gives_another_order() -> None:
    assert content(planner(key=7).plan(0)) != content(planner(key=100).plan(0))


def test_each_source_is_a_continuous_stream_with_each_sequence_once_an_epoch() -> None:
    plans = [planner().plan(step) for step in range(40)]
    for index, source in enumerate(sources()):
        positions, ids = [], []
        for plan in plans:
            for pack in np.flatnonzero(plan.packs.sources == index):
                positions.append(int(plan.packs.stream_positions[pack]))
                ids.append(plan.packs.sequence_ids[plan.packs.offsets[pack] : plan.packs.offsets[pack + 1]])
        assert positions == list(range(len(positions))), "nothing repeats, nothing drops"
        epochs = len(positions) // source.plan.packs
        assert epochs >= 2, "the test must cross the end of an epoch"
        for epoch in range(epochs):
            seen = np.concatenate(ids[epoch * source.plan.packs : (epoch + 1) * source.plan.packs])
            assert sorted(seen) == list(range(source.view.count))


@given(step=st.integers(0, 10**9))
@settings(max_examples=50)
def test_counts_are_those_of_the_packs(step: int) -> None:
    plan = planner(2, 2).plan(step)
    assert plan.counts.packs == PACKS_PER_STEP
    assert plan.counts.sequences == len(plan.packs.sequence_ids)
    assert plan.counts.tokens == plan.packs.lengths.sum()
    assert plan.counts.targets == plan.counts.tokens - plan.counts.sequences


@pytest.mark.parametrize("per_segment", [0.0, 40.0])
def test_the_cost_of_a_rank_is_that_of_its_packs_by_tokens_attention_and_segments(per_segment: float) -> None:
    weights = CostWeights(per_token=3.0, per_squared_length=0.5, per_segment=per_segment)
    shape = step_shape(items_per_step=PACKS_PER_STEP, items_per_micro_batch=4, cost_weights=weights)
    plan = StepPlanner(sources(), [3, 1], shape=shape, ranks=2, objective=NextTokens()).plan(5)

    def cost(lengths: np.ndarray) -> float:
        return float(3.0 * lengths.sum() + 0.5 * (lengths**2).sum() + per_segment * len(lengths))

    packs = np.split(plan.packs.lengths, plan.packs.offsets[1:-1])
    np.testing.assert_allclose(plan.costs, [cost(lengths) for lengths in packs])
    for rank in range(2):
        mine = [plan.micro_batch(rank, index).lengths for index in range(2)]
        assert plan.cost(rank) == pytest.approx(cost(np.concatenate(mine)))


SQUARES = CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0)
WINDOWED = replace(SQUARES, per_squared_length=0.25, per_pair_within={2: 0.5, 6: 0.25})
"""A model of one layer that sees whole sequences, two that see two tokens on each side, and one that sees six."""


@pytest.mark.parametrize("change", [{"per_token": -1.0}, {"per_segment": math.nan}, {"per_pair_within": {6: math.inf}}])
def test_a_weight_of_no_cost_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"must be a finite number, 0 or more, found {next(iter(change))}"):
        replace(SQUARES, **change)


def segmented_source() -> PackedSource:
    """Returns sequences of up to three segments each."""
    generator = np.random.default_rng(5)
    sequences = [generator.integers(1, 10, size=int(generator.integers(1, 4))).tolist() for _ in range(160)]
    return packed_source(sequences, pack_length=32, longest=32)


def plan_by(weights: CostWeights, source: PackedSource, step: int) -> StepPlan:
    shape = step_shape(items_per_step=PACKS_PER_STEP, items_per_micro_batch=4, cost_weights=weights)
    return StepPlanner([source], [1], shape=shape, ranks=4, objective=NextTokens()).plan(step)


def test_the_cost_of_a_pack_counts_the_pairs_within_each_window_in_its_segments() -> None:
    source = segmented_source()
    plan = plan_by(WINDOWED, source, 3)
    for pack, cost in enumerate(plan.costs):
        ids = plan.packs.sequence_ids[slice(*plan.packs.offsets[[pack, pack + 1]])]
        lengths = source.view.read(ids).counts.segment_lengths
        near = [sum(abs(i - j) <= reach for n in lengths for i in range(n) for j in range(n)) for reach in (2, 6)]
        assert cost == 0.25 * (lengths**2).sum() + 0.5 * near[0] + 0.25 * near[1]


def test_packs_balanced_by_windows_wait_less_than_those_balanced_by_squares() -> None:
    """The cost of both is that of the windows; squares take a long segment for many times what it costs."""
    source = segmented_source()
    excess = []
    for weights in (WINDOWED, SQUARES):
        loads = []
        for step in range(20):
            shares = plan_by(weights, source, step).assignment
            costs = plan_by(WINDOWED, source, step).costs
            loads.append([costs[shares.items_of(rank)].sum() for rank in range(4)])
        slowest, mean = np.max(loads, axis=1), np.mean(loads, axis=1)
        excess.append(float((slowest / mean - 1.0).mean()))
    assert excess[0] < 0.5 * excess[1]
