"""A plan of blocks: every sequence once per epoch, each block drawn from itself alone, any position at once."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import ListView

from evenpack.data.order.blocked_plan import BlockedPlan, Blocks, open_blocks, store_blocks
from evenpack.data.order.config import PackingConfig
from evenpack.data.order.pack_stream import DrawnPacks, PackStream
from evenpack.data.order.plan import sort_by_length
from evenpack.data.order.stored_plan import open_blocked_plan
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.errors import DataError

PACK_LENGTH = 24


def packed(histogram: LengthHistogram) -> Packing:
    return pack(histogram, "longest_pack_first", pack_length=PACK_LENGTH)


def plan_of(lengths: np.ndarray, bounds: list[int], *, key: int = 1, shuffles_blocks: bool = True) -> BlockedPlan:
    parts = [lengths[a:b] for a, b in itertools.pairwise(bounds)]
    histograms = [LengthHistogram.from_lengths(part, longest=PACK_LENGTH) for part in parts]
    ids = [sort_by_length(part, histogram) for part, histogram in zip(parts, histograms, strict=True)]
    blocks = Blocks.of([packed(histogram) for histogram in histograms])
    return BlockedPlan(blocks, np.concatenate(ids), key=key, shuffles_blocks=shuffles_blocks)


def random_lengths(count: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, PACK_LENGTH + 1, count)


def epoch_of(plan: BlockedPlan, epoch: int) -> DrawnPacks:
    return plan.draw(np.arange(epoch * plan.packs, (epoch + 1) * plan.packs))


@given(
    lengths=st.lists(st.integers(1, PACK_LENGTH), min_size=1, max_size=90),
    cuts=st.lists(st.integers(1, 89), max_size=6),
    key=st.integers(0, 2**64 - 1),
    shuffles_blocks=st.booleans(),
    epoch=st.integers(0, 10**6),
)
@settings(max_examples=80)
def test_an_epoch_holds_every_sequence_once_block_by_block_and_finds_it_again(
    lengths: list[int], cuts: list[int], key: int, shuffles_blocks: bool, epoch: int
) -> None:
    array = np.array(lengths)
    bounds = sorted({0, len(array), *(cut for cut in cuts if cut < len(array))})
    plan = plan_of(array, bounds, key=key, shuffles_blocks=shuffles_blocks)
    drawn = epoch_of(plan, epoch)
    np.testing.assert_array_equal(np.sort(drawn.sequence_ids), np.arange(len(array)))
    np.testing.assert_array_equal(drawn.lengths, array[drawn.sequence_ids])
    assert np.add.reduceat(drawn.lengths, drawn.offsets[:-1]).max() <= PACK_LENGTH
    assert np.diff(drawn.offsets).max() == plan.max_sequences_per_pack
    visited = np.searchsorted(bounds, drawn.sequence_ids, side="right")
    assert np.count_nonzero(np.diff(visited)) == len(bounds) - 2, "a block is left once and not come back to"


def test_any_positions_of_any_epochs_are_drawn_as_one_by_one() -> None:
    plan = plan_of(random_lengths(300), [0, 100, 130, 300])
    positions = np.random.default_rng(1).permutation(3 * plan.packs)[:50]
    together = plan.draw(positions)
    for index, position in enumerate(positions):
        alone = plan.draw(positions[index : index + 1])
        begin, end = together.offsets[index : index + 2]
        np.testing.assert_array_equal(alone.sequence_ids, together.sequence_ids[begin:end], err_msg=str(position))


def test_blocks_are_in_another_order_in_each_epoch_or_in_their_own() -> None:
    bounds = list(range(0, 301, 20))
    shuffled = plan_of(random_lengths(300), bounds)
    orders = [shuffled.sequences_ahead(epoch * shuffled.packs, 15) for epoch in range(3)]
    assert all(sorted(order) == list(itertools.pairwise(bounds)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    kept = plan_of(random_lengths(300), bounds, shuffles_blocks=False)
    assert kept.sequences_ahead(0, 15) == kept.sequences_ahead(kept.packs, 15) == list(itertools.pairwise(bounds))


def test_pack_mates_are_drawn_again_in_each_epoch_and_by_each_key() -> None:
    lengths, bounds = random_lengths(300), [0, 150, 300]
    plan = plan_of(lengths, bounds, shuffles_blocks=False)
    first, second = epoch_of(plan, 0), epoch_of(plan, 1)
    other = epoch_of(plan_of(lengths, bounds, key=2, shuffles_blocks=False), 0)
    for one in (second, other):
        assert (one.sequence_ids == first.sequence_ids).mean() < 0.2


def test_upcoming_blocks_start_at_the_position_and_cross_the_end_of_an_epoch() -> None:
    bounds = list(range(0, 301, 60))
    plan = plan_of(random_lengths(300), bounds)
    drawn = plan.draw(np.arange(3 * plan.packs))
    blocks = np.searchsorted(bounds, drawn.sequence_ids[drawn.offsets[:-1]], side="right") - 1
    visits = list(dict.fromkeys(zip(np.arange(3 * plan.packs) // plan.packs, blocks, strict=True)))
    for position in range(2 * plan.packs):
        begin = visits.index((position // plan.packs, blocks[position]))
        expected = [(bounds[block], bounds[block + 1]) for _, block in visits[begin : begin + 3]]
        assert plan.sequences_ahead(position, 3) == expected


def test_wrong_positions_and_ids_are_refused() -> None:
    plan = plan_of(random_lengths(100), [0, 40, 100])
    assert isinstance(plan, PackStream)
    with pytest.raises(ValueError, match="start at 0, found -1"):
        plan.draw(np.array([3, -1]))
    with pytest.raises(DataError, match="holds 3 sequence ids, but the blocks place 100"):
        BlockedPlan(plan.blocks, np.arange(3), key=1, shuffles_blocks=True)


@pytest.fixture
def view() -> ListView:
    return ListView(sequences=[[length] for length in random_lengths(200).tolist()], max_sequence_length=PACK_LENGTH)


def test_stored_blocks_give_the_plan_of_their_packings(view: ListView, tmp_path: Path) -> None:
    merged = store_blocks(tmp_path, view, [0, 70, 120, 200], packed)
    direct = plan_of(view.lengths(), [0, 70, 120, 200], key=5)
    opened = open_blocked_plan(tmp_path, key=5, shuffles_blocks=True)
    assert (opened.packs, opened.sequences) == (merged.packs, merged.sequences) == (direct.packs, 200)
    for epoch in (0, 3):
        np.testing.assert_array_equal(epoch_of(opened, epoch).sequence_ids, epoch_of(direct, epoch).sequence_ids)
    assert merged.histogram.counts.tolist() == np.bincount(view.lengths(), minlength=PACK_LENGTH + 1)[1:].tolist()


def test_stored_blocks_can_be_packed_again_or_taken_apart(view: ListView, tmp_path: Path) -> None:
    store_blocks(tmp_path, view, [0, 70, 200], packed)
    single = open_blocked_plan(tmp_path, key=5, shuffles_blocks=True, batching="sequences")
    assert (single.packs, single.max_sequences_per_pack) == (200, 1)
    pairs = PackingConfig(algorithm="longest_pack_first", max_sequences_per_pack=2)
    repacked = open_blocked_plan(tmp_path, key=5, shuffles_blocks=True, repacking=pairs)
    assert repacked.max_sequences_per_pack == 2
    for plan in (single, repacked):
        assert sorted(epoch_of(plan, 0).sequence_ids.tolist()) == list(range(200))


@pytest.mark.parametrize("name", ["blocks.json", "block_slot_lengths.npy", "block_sorted_sequences.npy"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_missing_or_broken_files_are_refused(view: ListView, tmp_path: Path, name: str, content: bytes | None) -> None:
    store_blocks(tmp_path, view, [0, 70, 200], packed)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    else:
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing or damaged .* prepare again"):
        open_blocks(tmp_path)
