"""Assignment of sequences to steps."""

from itertools import chain

import numpy as np
import pytest

from evenpack.data.order.step_shape import Batching, Layout
from evenpack.finetuning.batches import StepOrder

LENGTHS = np.random.default_rng(0).integers(3, 40, size=101)


def order(batching: Batching, layout: Layout, *, seed: int = 0, items: int = 8) -> StepOrder:
    return StepOrder(lengths=LENGTHS, pack_length=40, layout=layout, batching=batching, items_per_step=items, seed=seed)


def steps(found: StepOrder, epoch: int) -> list[list[int]]:
    return [sorted(packs.sequence_ids.tolist()) for packs in found.epoch(epoch)]


@pytest.mark.parametrize("batching", ["packs", "sequences"])
def test_each_epoch_has_every_sequence_once_in_the_same_steps_whatever_the_layout(batching: Batching) -> None:
    packed = order(batching, "packed")
    for epoch in range(3):
        found = steps(packed, epoch)
        assert sorted(chain(*found)) == list(range(len(LENGTHS)))
        assert len(found) == packed.steps_per_epoch
        assert steps(order(batching, "unpadded"), epoch) == found
        assert steps(order(batching, "padded"), epoch) == found
    assert steps(packed, 0) != steps(packed, 1)
    assert steps(packed, 0) != steps(order(batching, "packed", seed=1), 0)
    assert steps(packed, 0) == steps(order(batching, "packed"), 0)


def test_steps_of_sequences_hold_the_requested_number_and_packs_no_more_than_their_length() -> None:
    *whole, last = order("sequences", "packed", items=25).epoch(0)
    assert [len(packs.sequence_ids) for packs in whole] == [25] * 4
    assert len(last.sequence_ids) == 1
    for packs in whole:
        assert packs.packs < 25
        np.testing.assert_array_equal(LENGTHS[packs.sequence_ids], packs.lengths)
        assert np.add.reduceat(packs.lengths, packs.offsets[:-1]).max() <= 40


def test_steps_of_packs_hold_as_many_packs_and_as_many_sequences_as_come_with_them() -> None:
    *whole, last = order("packs", "packed", items=8).epoch(0)
    assert {packs.packs for packs in whole} == {8}
    assert 1 <= last.packs <= 8
    assert len({len(packs.sequence_ids) for packs in whole}) > 1
    assert min(len(packs.sequence_ids) for packs in whole) > 8


def test_single_sequences_are_packs_of_their_own_where_nothing_is_packed() -> None:
    packs = next(order("sequences", "padded", items=25).epoch(0))
    assert packs.packs == len(packs.sequence_ids) == 25
