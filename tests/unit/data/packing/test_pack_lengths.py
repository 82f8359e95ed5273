"""`pack` takes lengths and returns packs of their indices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.packing import pack_lengths
from evenpack.errors import PackingError


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    algorithm=st.sampled_from(["auto", "longest_pack_first", "next_fit", "none"]),
    limit=st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_sequence_is_in_exactly_one_pack_and_no_pack_overflows(
    lengths: list[int], algorithm: str, limit: int | None
) -> None:
    packing = pack_lengths(lengths, pack_length=20, algorithm=algorithm, max_sequences_per_pack=limit)
    packs = packing.assign(lengths)
    assert len(packs) == packing.packs
    assert sorted(int(index) for pack in packs for index in pack) == list(range(len(lengths)))
    of_strategies = np.repeat(np.arange(len(packing.strategies)), packing.counts)
    for pack, strategy in zip(packs, of_strategies, strict=True):
        assert tuple(lengths[index] for index in pack) == packing.strategies[strategy]
        assert sum(lengths[index] for index in pack) <= 20


def test_of_sequences_of_one_length_the_first_come_first() -> None:
    packs = pack_lengths([4, 4, 4, 4], pack_length=8).assign([4, 4, 4, 4])
    assert [pack.tolist() for pack in packs] == [[0, 1], [2, 3]]


def test_options_of_an_algorithm_are_passed_on() -> None:
    assert pack_lengths([3, 5], pack_length=8, algorithm="least_squares", weight=0.5).algorithm == "least_squares"
    with pytest.raises(PackingError, match="has no option 'wieght'"):
        pack_lengths([3, 5], pack_length=8, algorithm="least_squares", wieght=0.5)


@pytest.mark.parametrize("lengths", [[], [3, 0, 2], [3, 2.5], [3, 30], np.array([[1, 2], [3, 4]])], ids=str)
def test_what_is_no_list_of_lengths_is_refused(lengths: list[float] | np.ndarray) -> None:
    with pytest.raises(PackingError):
        pack_lengths(lengths, pack_length=20)


@pytest.mark.parametrize("others", [[5, 3], [5, 3, 2, 1], [5, 3, 3], [5.5, 3, 2]])
def test_other_lengths_than_those_that_were_packed_are_refused(others: list[int]) -> None:
    packing = pack_lengths([5, 3, 2], pack_length=8)
    with pytest.raises(PackingError, match=r"expected the lengths that were packed \(3 sequences of 10 tokens\)"):
        packing.assign(others)
