"""The grid of a shuffle: its size for a memory limit, the place of each sequence, and parts of nearly equal tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.shuffle.grid import BYTES_PER_SEQUENCE, PROGRAM_BYTES, Grid, choose_grid, equal_parts
from evenpack.errors import DataError

GIB = 1 << 30


def test_a_corpus_that_memory_holds_is_one_shard() -> None:
    assert choose_grid(token_bytes=GIB, sequences=1 << 20, memory=4 * GIB, seed=1) == Grid(rows=1, columns=1, seed=1)


@pytest.mark.parametrize("terabytes", [0.1, 2.0])
@pytest.mark.parametrize("gib", [4, 16, 64])
def test_rows_and_columns_of_a_large_corpus_are_as_large_as_the_limit_allows(terabytes: float, gib: int) -> None:
    token_bytes, sequences, memory = int(terabytes * 1e12), int(terabytes * 1e9), gib * GIB
    grid = choose_grid(token_bytes=token_bytes, sequences=sequences, memory=memory, seed=1)
    assert grid.rows == grid.columns
    held = (token_bytes + BYTES_PER_SEQUENCE * sequences) / grid.columns
    assert held + PROGRAM_BYTES < memory
    assert held / (grid.columns - 1) * grid.columns > 0.8 * (memory - PROGRAM_BYTES)


@pytest.mark.parametrize("token_bytes", [2 * 10**12, 7 * 10**12, 10**12])
def test_a_limit_that_no_grid_can_keep_is_refused_with_one_that_can(token_bytes: int) -> None:
    corpus = {"token_bytes": token_bytes, "sequences": token_bytes // 1000, "seed": 1}
    with pytest.raises(DataError, match=r"set data.shuffle.memory to (\d+\.\d+) GiB or more") as caught:
        choose_grid(memory=GIB, **corpus)
    enough = float(str(caught.value).split("memory to ")[1].split()[0])
    choose_grid(memory=int(enough * GIB), **corpus)
    with pytest.raises(DataError, match="of memory cannot hold a row of"):
        choose_grid(memory=int((enough - 0.02) * GIB), **corpus)


@pytest.mark.parametrize("asked", ["rows", "columns"])
def test_a_grid_that_is_requested_and_breaks_the_limit_is_refused(asked: str) -> None:
    with pytest.raises(DataError, match=rf"data.shuffle.{asked} is 2: .* give \d+ or more"):
        choose_grid(token_bytes=40 * GIB, sequences=1 << 24, memory=4 * GIB, seed=1, **{asked: 2})


@given(sequences=st.integers(0, 300), rows=st.integers(1, 12), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=60)
def test_a_column_is_permuted_and_cut_into_a_shard_for_each_row(sequences: int, rows: int, seed: int) -> None:
    grid = Grid(rows=rows, columns=3, seed=seed)
    assert sorted(grid.column_order(1, sequences).tolist()) == list(range(sequences))
    shards = grid.shards(sequences)
    assert [begin for begin, _ in shards[1:]] == [end for _, end in shards[:-1]]
    assert (shards[0][0], shards[-1][1]) == (0, sequences)
    sizes = [end - begin for begin, end in shards]
    assert max(sizes) - min(sizes) <= 1


def test_rows_columns_and_seeds_have_orders_of_their_own() -> None:
    grid, other = Grid(rows=2, columns=2, seed=1), Grid(rows=2, columns=2, seed=2)
    orders = [grid.column_order(0, 100), grid.column_order(1, 100), grid.row_order(0, 100), other.column_order(0, 100)]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    parts=st.integers(1, 10),
    chunk=st.integers(1, 30),
)
@settings(max_examples=100)
def test_parts_follow_one_another_and_differ_by_a_sequence_at_most(lengths: list[int], parts: int, chunk: int) -> None:
    array = np.array(lengths)
    arrays = [array[start : start + chunk] for start in range(0, len(array), chunk)]
    bounds = equal_parts(iter(arrays), total=int(array.sum()), parts=parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(lengths), parts + 1)
    assert bounds == sorted(bounds)
    ends = np.concatenate([[0], np.cumsum(array)])
    goals = array.sum() * np.arange(parts + 1) // parts
    assert (np.abs(ends[bounds] - goals) <= array.max()).all()
