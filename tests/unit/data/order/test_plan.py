"""The plan: every sequence once per epoch, new packs in each epoch, any position of the stream at once."""

import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import PUBLISHED_HISTOGRAMS
from scipy import stats

from evenpack.data.order import plan as plan_module
from evenpack.data.order.pack_stream import DrawnPacks
from evenpack.data.order.plan import PackPlan, sort_by_length, sort_chunks_by_length
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.permutation import sequence_id_type
from evenpack.errors import DataError, PackingError

PACK_LENGTH = 24


def plan_of(lengths: np.ndarray, *, key: int = 1, algorithm: str = "auto", depth: int | None = None) -> PackPlan:
    histogram = LengthHistogram.from_lengths(lengths, longest=PACK_LENGTH)
    packing = pack(histogram, algorithm, pack_length=PACK_LENGTH, max_sequences_per_pack=depth)
    return PackPlan(packing, sort_by_length(lengths, histogram), key=key)


def random_lengths(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, PACK_LENGTH + 1, count)


def as_packs(drawn: DrawnPacks) -> list[tuple[int, ...]]:
    return [tuple(drawn.sequence_ids[begin:end].tolist()) for begin, end in pairwise(drawn.offsets)]


def shapes(drawn: DrawnPacks) -> list[tuple[int, ...]]:
    """Returns the lengths in each pack, which identify its strategy."""
    return [tuple(drawn.lengths[begin:end].tolist()) for begin, end in pairwise(drawn.offsets)]


def agreement(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Returns the share of equal positions."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def epoch_of(plan: PackPlan, epoch: int) -> DrawnPacks:
    return plan.draw(np.arange(epoch * plan.packs, (epoch + 1) * plan.packs))


def places_of(drawn: DrawnPacks) -> np.ndarray:
    """Returns the pack of each sequence of an epoch, by its id."""
    return np.repeat(np.arange(len(drawn.offsets) - 1), np.diff(drawn.offsets))[np.argsort(drawn.sequence_ids)]


LENGTHS = st.lists(st.one_of(st.integers(1, PACK_LENGTH), st.sampled_from([1, 2, 12, 24])), min_size=1, max_size=120)


SETTINGS = st.fixed_dictionaries(
    {
        "key": st.integers(0, 2**64 - 1),
        "algorithm": st.sampled_from(["longest_pack_first", "shortest_pack_first", "none"]),
        "depth": st.one_of(st.none(), st.integers(1, 6)),
    }
)
"""Further arguments of `plan_of`. (Plans are made in the tests: run-time type checks draw random numbers.)"""


@given(lengths=LENGTHS, how=SETTINGS, epoch=st.one_of(st.integers(0, 3), st.integers(0, 10**9)))
@settings(max_examples=120)
def test_one_epoch_holds_every_sequence_once_in_packs_that_fit(lengths, how, epoch):
    lengths = np.array(lengths)
    plan = plan_of(lengths, **how)
    drawn = epoch_of(plan, epoch)
    np.testing.assert_array_equal(np.sort(drawn.sequence_ids), np.arange(len(lengths)))
    np.testing.assert_array_equal(drawn.lengths, lengths[drawn.sequence_ids])
    sizes = np.diff(drawn.offsets)
    assert drawn.offsets[0] == 0
    assert (sizes >= 1).all()
    assert sizes.max() == plan.max_sequences_per_pack
    assert np.add.reduceat(drawn.lengths, drawn.offsets[:-1]).max() <= PACK_LENGTH


@given(lengths=LENGTHS, how=SETTINGS, data=st.data())
@settings(max_examples=80)
def test_a_pack_is_the_same_however_it_is_drawn(lengths, how, data):
    """In one call over several epochs, in pieces that cross their borders, alone, or in any order."""
    plan = plan_of(np.array(lengths), **how)
    start = data.draw(st.integers(0, 3 * plan.packs))
    stop = start + 2 * plan.packs + 1
    positions = np.arange(start, stop)
    expected = as_packs(plan.draw(positions))
    cuts = [start, *sorted(data.draw(st.lists(st.integers(start, stop), max_size=4))), stop]
    pieces = [as_packs(plan.draw(np.arange(begin, end))) for begin, end in pairwise(cuts)]
    assert [one for piece in pieces for one in piece] == expected
    order = np.array(data.draw(st.permutations(range(len(positions)))))
    assert as_packs(plan.draw(positions[order])) == [expected[place] for place in order]
    assert as_packs(plan.draw(positions[-1:])) == expected[-1:]


def test_pack_mates_and_order_are_drawn_again_in_each_epoch():
    plan = plan_of(random_lengths(3_000))
    epochs = [as_packs(epoch_of(plan, epoch)) for epoch in range(3)]
    companies = [{frozenset(ids) for ids in packs if len(ids) > 1} for packs in epochs]
    for one, other in pairwise(companies):
        assert len(one & other) < len(one) / 20
    for epoch in range(3):
        assert agreement(shapes(epoch_of(plan, epoch)), shapes(epoch_of(plan, epoch + 1))) < 0.2
    places = np.array([places_of(epoch_of(plan, epoch)) for epoch in range(3)])
    for one, other in pairwise(places):
        assert abs(stats.spearmanr(one, other).statistic) < 0.08
        assert (one == other).mean() < 0.01


def test_every_possible_pack_mate_and_every_place_is_equally_likely():
    """There are ten sequences of each of two lengths that fill a pack together, and 4,000 epochs."""
    plan = plan_of(np.repeat([PACK_LENGTH - 1, 1], 10))
    assert plan.packs == 10
    ids = plan.draw(np.arange(4_000 * 10)).sequence_ids.reshape(4_000, 10, 2)
    mates = ids[ids[:, :, 0] == 3][:, 1]
    places = np.nonzero(ids[:, :, 0] == 3)[1]
    for observed in (np.bincount(mates)[10:], np.bincount(places)):
        assert len(observed) == 10
        assert stats.chisquare(observed).pvalue > 1e-4
    after = places[1:] * 10 + places[:-1]
    assert stats.chisquare(np.bincount(after, minlength=100)).pvalue > 1e-4


def test_the_key_alone_chooses_the_order():
    lengths = random_lengths(500)
    one, same, other = (epoch_of(plan_of(lengths, key=key), 0) for key in (5, 5, 6))
    assert as_packs(one) == as_packs(same)
    assert agreement(as_packs(one), as_packs(other)) < 0.1
    assert agreement(shapes(one), shapes(other)) < 0.2


def test_the_order_is_the_same_on_every_platform_and_in_every_version():
    """A changed value would change the order of every run that is resumed."""
    plan = plan_of(np.array([20, 4, 4, 12, 12, 12, 7, 5, 20, 24, 1, 1]), key=42)
    assert as_packs(plan.draw(np.arange(8))) == [(8, 2), (9,), (10, 11), (0, 1), (3, 5), (4, 6, 7), (8, 1), (5, 6, 7)]


def test_packs_are_drawn_from_a_mapped_index_without_loading_it(tmp_path: Path):
    count = 2_000_000
    histogram = LengthHistogram(counts=np.array([count // 2, count // 2]))
    index = np.memmap(tmp_path / "ids", dtype=np.int64, mode="w+", shape=(count,))
    index[:] = np.arange(count)
    index.flush()
    tracemalloc.start()
    try:
        mapped = np.memmap(tmp_path / "ids", dtype=np.int64, mode="r", shape=(count,))
        plan = PackPlan(pack(histogram, pack_length=3), mapped, key=3)
        drawn = plan.draw(np.arange(plan.packs - 500, plan.packs))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert drawn.sequence_ids.nbytes == 8_000
    assert peak < 1 << 20 < mapped.nbytes


def test_the_far_end_of_a_billion_packs_is_drawn():
    """The index stands still at one value, so that it takes no memory; its length is what counts."""
    histogram = LengthHistogram(counts=np.array([10**9, 10**9]))
    plan = PackPlan(pack(histogram, pack_length=3), np.broadcast_to(np.int32(0), 2 * 10**9), key=1)
    assert plan.packs == 10**9
    drawn = plan.draw(np.array([0, 10**9 - 1, 10**9, 10**18]))
    assert drawn.lengths.tolist() == [2, 1] * 4


class _OwnPlaces:
    """Ids of sequences that are already sorted by length: each id is its position, and no memory is needed."""

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return places


@pytest.mark.parametrize("algorithm", ["longest_pack_first", "cutting_stock"])
def test_counts_beyond_32_bits_are_drawn_exactly(algorithm: str):
    counts = [5 * 10**9 + 1, 0, 3 * 2**31, 2**33 + 7, 1, 2**33 + 3]
    packing = pack(counts, algorithm, pack_length=9)
    sequences = sum(counts)
    plan = PackPlan(packing, np.broadcast_to(np.int64(0), sequences), key=11)
    plan._sorted_sequence_ids = _OwnPlaces()
    assert plan.packs > 1 << 33
    places = {0, 1, *range(0, plan.packs, plan.packs // 2999), plan.packs - 1}
    positions = np.array(sorted(places)) + 10**7 * plan.packs
    drawn = plan.draw(positions)
    first_of_class = np.append([0, 0], np.cumsum(counts))
    assert (first_of_class[drawn.lengths] <= drawn.sequence_ids).all()
    assert (drawn.sequence_ids < first_of_class[drawn.lengths + 1]).all()
    assert drawn.sequence_ids.max() > 1 << 34
    assert len(np.unique(drawn.sequence_ids)) == len(drawn.sequence_ids)
    assert set(shapes(drawn)) <= set(packing.strategies)


@pytest.mark.parametrize(("sequences", "kind"), [(1, np.int32), (2**31, np.int32), (2**31 + 1, np.int64)])
def test_ids_are_of_a_type_that_holds_the_last_one(sequences: int, kind: type):
    assert sequence_id_type(sequences) == kind
    assert np.iinfo(sequence_id_type(sequences)).max >= sequences - 1


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=60)
def test_the_order_does_not_depend_on_how_the_lengths_come(lengths, data):
    histogram = LengthHistogram.from_lengths(lengths, longest=PACK_LENGTH)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=8)))
    chunks = np.split(np.array(lengths, dtype=np.uint16), cuts)
    out = np.full(len(lengths), -1, dtype=np.int32)
    sort_chunks_by_length(iter(chunks), histogram, out)
    np.testing.assert_array_equal(out, np.lexsort((np.arange(len(lengths)), lengths)))


def test_an_index_of_another_size_is_not_filled():
    histogram = LengthHistogram.from_lengths([1, 2], longest=2)
    with pytest.raises(PackingError, match="space for 3 ids, but the histogram counts 2"):
        sort_chunks_by_length([np.array([1, 2])], histogram, np.zeros(3, dtype=np.int32))


@given(lengths=LENGTHS, kind=st.sampled_from([np.uint8, np.int32, np.int64, np.uint64]))
@settings(max_examples=60)
def test_sequences_are_sorted_by_length_and_then_by_id(lengths, kind):
    histogram = LengthHistogram.from_lengths(lengths, longest=PACK_LENGTH)
    given_lengths = np.array(lengths, dtype=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_SORT_CHUNK", 7)
        in_chunks = sort_by_length(given_lengths, histogram)
    np.testing.assert_array_equal(in_chunks, np.lexsort((np.arange(len(lengths)), lengths)))
    out = np.zeros(len(lengths), dtype=np.int64)
    assert sort_by_length(given_lengths, histogram, out=out) is out
    np.testing.assert_array_equal(out, in_chunks)


def test_lengths_above_sixteen_bits_are_sorted_too():
    lengths = np.array([70_000, 4_464, 70_000, 65_536, 1])
    histogram = LengthHistogram.from_lengths(lengths, longest=70_000)
    assert sort_by_length(lengths, histogram).tolist() == [4, 1, 3, 0, 2]


@pytest.mark.parametrize(
    "lengths", [[1, 2, 3], [1, 2, 3, 3], [1, 1, 2, 2], [1, 2, 2, 9], [1, 2, 2, 3 - 2**16], [1, 2, 2, 3 + 2**16]]
)
def test_lengths_of_another_histogram_are_not_sorted(lengths):
    histogram = LengthHistogram.from_lengths([1, 2, 2, 3], longest=PACK_LENGTH)
    with pytest.raises(PackingError, match="histogram count"):
        sort_by_length(np.array(lengths), histogram)


def test_an_index_of_another_preparation_is_refused():
    packing = pack(LengthHistogram.from_lengths([1, 2, 3], longest=3), pack_length=3)
    with pytest.raises(DataError, match=r"holds 2 sequence ids, but its strategies place 3.*prepare the data again"):
        PackPlan(packing, np.arange(2), key=0)


def test_a_stream_begins_at_zero():
    plan = plan_of(np.array([5, 5, 6]))
    with pytest.raises(ValueError, match="start at 0, found -2"):
        plan.draw(np.array([0, -2]))


def test_no_positions_draw_no_packs():
    drawn = plan_of(np.array([5])).draw(np.zeros(0, dtype=np.int64))
    assert drawn.offsets.tolist() == [0]
    assert len(drawn.sequence_ids) == len(drawn.lengths) == 0


def test_a_real_histogram_keeps_its_sequences_through_two_epochs():
    lengths = np.repeat(np.arange(1, 385), PUBLISHED_HISTOGRAMS["squad_1_1_384"])
    np.random.default_rng(3).shuffle(lengths)
    histogram = LengthHistogram.from_lengths(lengths, longest=384)
    plan = PackPlan(pack(histogram, pack_length=384), sort_by_length(lengths, histogram), key=8)
    drawn = plan.draw(np.arange(2 * plan.packs))
    assert set(Counter(drawn.sequence_ids.tolist()).values()) == {2}
    assert len(np.unique(drawn.sequence_ids)) == len(lengths) == 88_641
