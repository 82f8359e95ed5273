"""Assignment policies: every item once, no empty share, and the properties of each policy."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import PUBLISHED_HISTOGRAMS
from step_shapes import step_shape

from evenpack.data.order.assignment import StepAssignment, assign_step, padded_width
from evenpack.data.order.balance import assign_by_cost
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, Batching, Layout, default_policy
from evenpack.errors import ConfigError

EQUAL_COUNTS = ("arrival", "sorted", "sorted_serpentine", "cost_balanced")
EVERY_WAY = [(policy, layout) for policy in get_args(AssignmentPolicy) for layout in get_args(Layout)]


def assigned(
    policy: AssignmentPolicy,
    lengths: list[int] | np.ndarray,
    ranks: int = 1,
    micro_batches: int = 1,
    *,
    layout: Layout = "unpadded",
    per_micro_batch: bool = False,
) -> StepAssignment:
    values = np.array(lengths, dtype=np.int64)
    shape = step_shape(
        items_per_step=ranks * micro_batches,
        items_per_micro_batch=1,
        policy=policy,
        layout=layout,
        balances_each_micro_batch=per_micro_batch,
    )
    return assign_step(shape, values, values.astype(np.float64) ** 2, ranks=ranks)


def lengths_of_shares(shares: StepAssignment, lengths: list[int] | np.ndarray) -> list[list[int]]:
    return [np.array(lengths)[shares.items_of(number)].tolist() for number in range(len(shares.offsets) - 1)]


def wikipedia_lengths(count: int, *, seed: int = 1) -> np.ndarray:
    counts = np.array(PUBLISHED_HISTOGRAMS["wikipedia_512"], dtype=np.float64)
    return np.random.default_rng(seed).choice(len(counts), size=count, p=counts / counts.sum()) + 1


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draws the lengths of a step that any policy can assign, ranks, and micro-batches."""
    ranks, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    items = ranks * micro_batches * draw(st.integers(1, 7))
    return draw(st.lists(st.integers(1, 70_000), min_size=items, max_size=items)), ranks, micro_batches


@pytest.mark.parametrize(("policy", "layout"), EVERY_WAY)
@given(step=steps(), wait=st.booleans())
@settings(max_examples=40)
def test_each_item_is_assigned_once_and_no_share_is_empty(policy, layout, step, wait):
    lengths, ranks, micro_batches = step
    items = len(lengths)
    given_lengths = list(lengths)
    shares = assigned(policy, lengths, ranks, micro_batches, layout=layout, per_micro_batch=wait)
    assert lengths == given_lengths
    np.testing.assert_array_equal(np.sort(shares.items), np.arange(items))
    assert shares.offsets[[0, -1]].tolist() == [0, items]
    assert len(shares.offsets) == ranks * micro_batches + 1
    assert (np.diff(shares.offsets) >= 1).all()
    if policy in EQUAL_COUNTS:
        assert (np.diff(shares.offsets) == items // (ranks * micro_batches)).all()
    again = assigned(policy, lengths, ranks, micro_batches, layout=layout, per_micro_batch=wait)
    np.testing.assert_array_equal(again.items, shares.items)
    np.testing.assert_array_equal(again.offsets, shares.offsets)


def test_arrival_gives_each_rank_the_next_items_micro_batch_by_micro_batch():
    shares = assigned("arrival", [5, 1, 4, 2, 8, 3, 7, 6], ranks=2, micro_batches=2)
    assert lengths_of_shares(shares, [5, 1, 4, 2, 8, 3, 7, 6]) == [[5, 1], [4, 2], [8, 3], [7, 6]]


def test_sorted_puts_near_lengths_together_and_the_longest_first():
    lengths = [1, 9, 5, 3, 8, 2, 6, 4]
    assert lengths_of_shares(assigned("sorted", lengths, ranks=4), lengths) == [[9, 8], [6, 5], [4, 3], [2, 1]]
    # Both ranks start with a long run, and the rank that had the longer one ends with the shorter.
    by_share = lengths_of_shares(assigned("sorted", lengths, ranks=2, micro_batches=2), lengths)
    assert by_share == [[9, 8], [2, 1], [6, 5], [4, 3]]


def test_a_serpentine_goes_back_and_forth_over_ranks_and_micro_batches():
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    by_rank = lengths_of_shares(assigned("sorted_serpentine", lengths, ranks=4), lengths)
    assert by_rank == [[8, 1], [7, 2], [6, 3], [5, 4]]
    by_share = lengths_of_shares(assigned("sorted_serpentine", lengths, ranks=2, micro_batches=2), lengths)
    assert by_share == [[8, 1], [5, 4], [7, 2], [6, 3]]


def test_items_of_one_length_keep_their_order():
    np.testing.assert_array_equal(assigned("sorted", [3, 3, 3, 3], ranks=2).items, [0, 1, 2, 3])


@pytest.mark.parametrize("per_micro_batch", [False, True])
def test_cost_balanced_is_what_balance_deals(per_micro_batch):
    lengths = wikipedia_lengths(4 * 3 * 8)
    shares = assigned("cost_balanced", lengths, 4, 3, per_micro_batch=per_micro_batch)
    costs = lengths.astype(np.float64) ** 2
    expected = assign_by_cost(costs, ranks=4, micro_batches=3, per_micro_batch=per_micro_batch)
    np.testing.assert_array_equal(shares.items.reshape(4, 3, 8), expected)


def test_constant_tokens_cuts_arrival_where_it_is_nearest_to_equal_shares():
    lengths = [4, 4, 1, 1, 6, 2, 2, 4]
    # 24 tokens, so cuts are wanted at 8 and 16; 10 + 6 is met exactly, too.
    assert lengths_of_shares(assigned("max_tokens", lengths, ranks=3), lengths) == [[4, 4], [1, 1, 6], [2, 2, 4]]
    assert lengths_of_shares(assigned("max_tokens", [2, 9, 5, 4], ranks=2), [2, 9, 5, 4]) == [[2, 9], [5, 4]]
    assert lengths_of_shares(assigned("max_tokens", [9, 8, 2, 1], ranks=2), [9, 8, 2, 1]) == [[9], [8, 2, 1]]
    assert lengths_of_shares(assigned("max_tokens", [1, 1, 100], ranks=3), [1, 1, 100]) == [[1], [1], [100]]
    assert lengths_of_shares(assigned("max_tokens", [100, 1, 1], ranks=3), [100, 1, 1]) == [[100], [1], [1]]


@given(ranks=st.integers(1, 8), lengths=st.lists(st.integers(1, 512), min_size=8, max_size=80))
@settings(max_examples=150)
def test_constant_tokens_is_within_the_longest_of_equal_shares(ranks, lengths):
    sums = [sum(share) for share in lengths_of_shares(assigned("max_tokens", lengths, ranks), lengths)]
    # Each cut is at most half an item off, unless a share would be empty: then it holds one item.
    assert max(sums) <= sum(lengths) / ranks + max(lengths)


def slots(share: list[int]) -> int:
    """Returns the slots of a rectangle whose rows are rounded up to a multiple of 8."""
    return len(share) * math.ceil(max(share) / 8) * 8


def least_rectangle(lengths: list[int], shares: int) -> int:
    """Returns the least rectangle over all cuts of the sorted lengths."""
    falling = sorted(lengths, reverse=True)
    cuts = ([0, *inner, len(falling)] for inner in itertools.combinations(range(1, len(falling)), shares - 1))
    return min(max(slots(falling[start:end]) for start, end in itertools.pairwise(cut)) for cut in cuts)


@given(ranks=st.integers(1, 5), lengths=st.lists(st.integers(1, 90), min_size=5, max_size=10))
@settings(max_examples=300)
def test_no_cut_has_a_smaller_largest_rectangle(ranks, lengths):
    by_share = lengths_of_shares(assigned("max_tokens", lengths, ranks, layout="padded"), lengths)
    assert max(map(slots, by_share)) == least_rectangle(lengths, ranks)
    assert [length for share in by_share for length in share] == sorted(lengths, reverse=True)


def test_ranks_get_neighbouring_rectangles_in_each_micro_batch():
    lengths = wikipedia_lengths(2 * 4 * 32)
    shares = assigned("max_tokens", lengths, 2, 4, layout="padded")
    longest = np.array([max(share) for share in lengths_of_shares(shares, lengths)]).reshape(2, 4)
    assert (np.diff(longest, axis=1) <= 0).all()
    assert longest[:, 1:].max(axis=0).max() <= longest[:, :-1].min(axis=0).max()


def test_a_rectangle_is_as_wide_as_its_longest_row_needs():
    longest = np.array([1, 8, 9, 509])
    assert padded_width("sorted", longest, 510).tolist() == [8, 8, 16, 510]
    assert padded_width("max_tokens", longest, 512).tolist() == [8, 8, 16, 512]
    assert padded_width("arrival", longest, 510).tolist() == [510] * 4


@pytest.mark.parametrize("policy", EQUAL_COUNTS)
def test_a_step_that_cannot_be_assigned_equally_is_refused(policy):
    with pytest.raises(ConfigError, match=r"7 .* cannot be assigned equally to 2 ranks x 2 .* multiple of 4"):
        assigned(policy, [1] * 7, ranks=2, micro_batches=2)


def test_constant_tokens_needs_only_one_item_for_each_share():
    assert len(assigned("max_tokens", [1] * 7, ranks=2, micro_batches=2).offsets) == 5
    with pytest.raises(ConfigError, match=r"3 items cannot be assigned with one or more for each to 2 ranks x 2"):
        assigned("max_tokens", [1] * 3, ranks=2, micro_batches=2)


@pytest.mark.parametrize("policy", ["arrival", "sorted", "sorted_serpentine", "max_tokens"])
def test_an_item_without_tokens_is_refused(policy):
    with pytest.raises(ValueError, match="item 1 of a step must have 1 token or more, found 0"):
        assigned(policy, [1, 0], ranks=2)


def test_every_batching_has_a_default_among_its_policies():
    for (batching, layout), policies in POLICIES.items():
        assert default_policy(batching, layout) in policies
    assert {batching for batching, _ in POLICIES} == set(get_args(Batching))
