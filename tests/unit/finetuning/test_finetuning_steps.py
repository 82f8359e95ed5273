"""Assignment of sequences to steps."""

from itertools import chain

import numpy as np
import pytest
from step_shapes import step_shape

from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import Batching, Layout
from evenpack.data.sequences.labelled import LabelledSequences, TokenPair
from evenpack.finetuning.steps import EpochPlanner, packed_source

LENGTHS = np.random.default_rng(0).integers(3, 40, size=101)
NO_TOKENS = np.empty(0, dtype=np.int64)
SEQUENCES = LabelledSequences.of(
    [TokenPair(first=np.ones(length, dtype=np.int64), second=NO_TOKENS) for length in LENGTHS],
    np.zeros(len(LENGTHS), dtype=np.int64),
    max_sequence_length=40,
)


def planner(batching: Batching, layout: Layout, *, seed: int = 0, items: int = 8, at_once: int = 8) -> EpochPlanner:
    shape = step_shape(batching=batching, items_per_step=items, items_per_micro_batch=at_once, layout=layout)
    return EpochPlanner(source=packed_source(SEQUENCES, seed=seed), shape=shape, seed=seed)


def epoch_of(found: EpochPlanner, epoch: int) -> list[PackSelection]:
    first = epoch * found.steps_per_epoch
    return [found.plan(step).packs for step in range(first, first + found.steps_per_epoch)]


def steps(found: EpochPlanner, epoch: int) -> list[list[int]]:
    return [sorted(packs.sequence_ids.tolist()) for packs in epoch_of(found, epoch)]


@pytest.mark.parametrize("batching", ["packs", "sequences"])
def test_each_epoch_has_every_sequence_once_in_the_same_steps_whatever_the_layout(batching: Batching) -> None:
    packed = planner(batching, "packed")
    for epoch in range(3):
        found = steps(packed, epoch)
        assert sorted(chain(*found)) == list(range(len(LENGTHS)))
        assert len(found) == packed.steps_per_epoch
        assert steps(planner(batching, "unpadded"), epoch) == found
        assert steps(planner(batching, "padded"), epoch) == found
    assert steps(packed, 0) != steps(packed, 1)
    assert steps(packed, 0) != steps(planner(batching, "packed", seed=1), 0)
    assert steps(packed, 0) == steps(planner(batching, "packed"), 0)


def test_steps_of_sequences_hold_their_number_and_packs_their_length() -> None:
    *whole, last = epoch_of(planner("sequences", "packed", items=25), 0)
    assert [len(packs.sequence_ids) for packs in whole] == [25] * 4
    assert len(last.sequence_ids) == 1
    for packs in whole:
        assert packs.packs < 25
        np.testing.assert_array_equal(LENGTHS[packs.sequence_ids], packs.lengths)
        assert np.add.reduceat(packs.lengths, packs.offsets[:-1]).max() <= 40


def test_steps_of_packs_hold_as_many_packs_and_as_many_sequences_as_come_with_them() -> None:
    *whole, last = epoch_of(planner("packs", "packed", items=8), 0)
    assert {packs.packs for packs in whole} == {8}
    assert 1 <= last.packs <= 8
    assert len({len(packs.sequence_ids) for packs in whole}) > 1
    assert min(len(packs.sequence_ids) for packs in whole) > 8


def test_single_sequences_are_packs_of_their_own_where_nothing_is_packed() -> None:
    packs = planner("sequences", "padded", items=25).plan(0).packs
    assert packs.packs == len(packs.sequence_ids) == 25
