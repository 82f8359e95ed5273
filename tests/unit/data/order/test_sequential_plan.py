"""Rows are drawn in the order in which they were prepared."""

import numpy as np
import pytest

from evenpack.data.order.stored_plan import SequentialPlan
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.errors import DataError


def packing_of(lengths: list[int], *, pack_length: int = 8) -> Packing:
    return pack(LengthHistogram.from_lengths(lengths, longest=pack_length), pack_length=pack_length)


@pytest.mark.parametrize("lengths", [[8, 8, 8], [8, 8, 3], [8], [3], [8, 8, 8, 8, 1]])
def test_each_epoch_takes_every_row_once_and_in_order(lengths: list[int]) -> None:
    plan = SequentialPlan(packing_of(lengths))
    drawn = plan.draw(np.arange(2 * len(lengths)))

    assert drawn.sequence_ids.tolist() == [*range(len(lengths))] * 2
    assert drawn.lengths.tolist() == lengths * 2
    assert np.diff(drawn.offsets).tolist() == [1] * (2 * len(lengths))
    for packs in (1, 2, 4):
        assert plan.largest_sums(np.arange(9), packs).tolist() == sorted(lengths, reverse=True)[:packs]


def test_a_row_is_found_in_any_epoch() -> None:
    plan = SequentialPlan(packing_of([8, 8, 3]))
    positions, slots = plan.find(np.array([2, 0]), np.array([3, 8]), epoch=5)

    assert plan.draw(positions).sequence_ids.tolist() == [2, 0]
    assert slots.tolist() == [0, 0]
    with pytest.raises(DataError, match="this plan has 3"):
        plan.find(np.array([3]), np.array([8]), epoch=0)


@pytest.mark.parametrize("lengths", [[8, 5, 3], [8, 3, 3]])
def test_sequences_that_are_no_rows_are_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="at most one that is shorter"):
        SequentialPlan(packing_of(lengths))


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="start at 0"):
        SequentialPlan(packing_of([8])).draw(np.array([-1]))
