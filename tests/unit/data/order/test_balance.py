"""Assignment by cost: every pack once, equal counts, and as little waiting as possible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import PUBLISHED_HISTOGRAMS

from evenpack.data.order import balance
from evenpack.data.order.balance import assign_by_cost
from evenpack.data.packing import LengthHistogram, pack
from evenpack.errors import ConfigError

COST = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0, 262_144.0]), st.floats(0, 1e12))


def sampled_steps(name: str, packs: int, *, steps: int) -> np.ndarray:
    """Returns the attention cost (sum of length²) of random packs, as [steps, packs]."""
    counts = np.array(PUBLISHED_HISTOGRAMS[name])
    packing = pack(LengthHistogram(counts=counts), pack_length=len(counts))
    costs = np.array([float(np.square(strategy).sum()) for strategy in packing.strategies])
    chances = packing.counts / packing.packs
    return costs[np.random.default_rng(1).choice(len(costs), size=(steps, packs), p=chances)]


def imbalance(costs: np.ndarray, assigned: np.ndarray) -> float:
    """Returns the cost of the most expensive rank over that of the mean rank, in the whole step."""
    sums = costs[assigned].sum(axis=(1, 2))
    return float(sums.max() / sums.mean())


@given(
    ranks=st.integers(1, 9),
    micro_batches=st.integers(1, 5),
    share=st.integers(1, 9),
    per_micro_batch=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150)
def test_every_pack_is_assigned_once_in_equal_counts(ranks, micro_batches, share, per_micro_batch, data):
    packs = ranks * micro_batches * share
    costs = np.array(data.draw(st.lists(COST, min_size=packs, max_size=packs)))
    given_costs = costs.copy()
    assigned = assign_by_cost(costs, ranks=ranks, micro_batches=micro_batches, per_micro_batch=per_micro_batch)
    assert assigned.shape == (ranks, micro_batches, share)
    np.testing.assert_array_equal(np.sort(assigned, axis=None), np.arange(packs))
    np.testing.assert_array_equal(costs, given_costs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(balance, "_PLACE_BITS", 0)  # as in a step of too many packs
        again = assign_by_cost(costs, ranks=ranks, micro_batches=micro_batches, per_micro_batch=per_micro_batch)
    np.testing.assert_array_equal(assigned, again)


def test_places_and_costs_of_the_largest_step_fit_into_one_number():
    """2^22 packs, the most expensive first and last: the largest key has 62 bits."""
    units = np.full(1 << balance._PLACE_BITS, 0)
    units[[0, -1]] = 1 << 40
    found = balance._most_expensive_first(units)
    assert found[:2].tolist() == [0, len(units) - 1]
    np.testing.assert_array_equal(found[2:], np.arange(1, len(units) - 1))


@given(ranks=st.integers(2, 6), share=st.integers(1, 6), data=st.data(), per_micro_batch=st.booleans())
@settings(max_examples=60)
def test_ranks_differ_by_one_pack_at_most(ranks, share, data, per_micro_batch):
    costs = np.array(data.draw(st.lists(st.floats(0, 1e6), min_size=ranks * share, max_size=ranks * share)))
    assigned = assign_by_cost(costs, ranks=ranks, micro_batches=1, per_micro_batch=per_micro_batch)
    sums = costs[assigned].sum(axis=(1, 2))
    assert sums.max() - sums.min() <= (costs.max() - costs.min()) * (1 + 1e-9)


@given(
    ranks=st.integers(2, 5),
    share=st.integers(2, 4),
    costs=st.lists(st.integers(0, 20), min_size=20, max_size=20),
)
@settings(max_examples=200)
def test_exchanges_only_bring_the_most_expensive_rank_down(ranks, share, costs):
    costs = np.array(costs[: ranks * share], dtype=np.float64)
    serpentine = -np.sort(-costs).reshape(share, ranks)
    serpentine[1::2] = serpentine[1::2, ::-1].copy()
    assigned = assign_by_cost(costs, ranks=ranks, micro_batches=1, per_micro_batch=False)
    assert costs[assigned].sum(axis=(1, 2)).max() <= serpentine.sum(axis=0).max()


@pytest.mark.parametrize(
    ("name", "random_exceeds", "allowed"), [("wikipedia_512", 1.2, 1.0025), ("wikipedia_2048", 1.4, 1.0015)]
)
def test_sixty_four_ranks_hardly_wait(name, random_exceeds, allowed):
    steps = sampled_steps(name, 64 * 8, steps=40)
    assigned = [
        imbalance(costs, assign_by_cost(costs, ranks=64, micro_batches=1, per_micro_batch=False)) for costs in steps
    ]
    as_they_come = [imbalance(costs, np.arange(512).reshape(64, 1, 8)) for costs in steps]
    assert np.mean(as_they_come) > random_exceeds
    assert np.mean(assigned) < allowed


@pytest.mark.parametrize(("ranks", "share"), [(2, 512), (16, 300)])
def test_many_packs_a_rank_are_evened_out_to_the_last_ten_thousandth(ranks, share):
    for costs in sampled_steps("wikipedia_512", ranks * share, steps=5):
        assigned = assign_by_cost(costs, ranks=ranks, micro_batches=1, per_micro_batch=False)
        assert imbalance(costs, assigned) < 1.0001


@pytest.mark.parametrize("name", ["wikipedia_512", "wikipedia_2048"])
def test_ranks_are_even_in_each_micro_batch_where_they_wait_in_each(name):
    def waiting(per_micro_batch: bool) -> float:
        found = []
        for costs in sampled_steps(name, 64 * 4 * 8, steps=10):
            assigned = assign_by_cost(costs, ranks=64, micro_batches=4, per_micro_batch=per_micro_batch)
            sums = costs[assigned].sum(axis=2)
            found.append(sums.max(axis=0).sum() / sums.mean(axis=0).sum())
        return float(np.mean(found))

    assert waiting(True) < 1.003
    assert waiting(False) - 1 > 2 * (waiting(True) - 1)


def test_one_pack_a_micro_batch_puts_equals_side_by_side():
    costs = np.array([5.0, 1.0, 5.0, 1.0, 3.0, 3.0])
    assigned = assign_by_cost(costs, ranks=2, micro_batches=3, per_micro_batch=True)
    np.testing.assert_array_equal(costs[assigned[:, :, 0]], [[5.0, 3.0, 1.0]] * 2)


@pytest.mark.parametrize("per_micro_batch", [False, True])
def test_the_most_expensive_packs_of_a_rank_come_first(per_micro_batch):
    costs = sampled_steps("wikipedia_512", 8 * 4 * 2, steps=1)[0]
    assigned = assign_by_cost(costs, ranks=8, micro_batches=4, per_micro_batch=per_micro_batch)
    rank_costs = costs[assigned].reshape(8, -1)
    assert (np.diff(rank_costs, axis=1) <= 0).all()


@pytest.mark.parametrize("scale", [2.0**-60, 3.0, 1e9])
def test_the_unit_of_cost_does_not_count(scale):
    costs = sampled_steps("wikipedia_2048", 8 * 4 * 4, steps=1)[0]
    one, other = (assign_by_cost(c, ranks=8, micro_batches=4, per_micro_batch=True) for c in (costs, costs * scale))
    np.testing.assert_array_equal(one, other)


def test_packs_of_equal_cost_are_assigned_by_index():
    assigned = assign_by_cost(np.ones(6), ranks=3, micro_batches=1, per_micro_batch=False)
    assert assigned.reshape(3, 2).tolist() == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("packs", "ranks", "micro_batches", "message"),
    [
        (10, 4, 1, "10 packs cannot be assigned equally to 4 ranks x 1 micro-batches.*multiple of 4"),
        (0, 2, 1, "a step of 0 packs"),
        (4, 0, 1, "0 ranks"),
    ],
)
def test_what_cannot_be_assigned_equally_is_refused(packs, ranks, micro_batches, message):
    with pytest.raises(ConfigError, match=message):
        assign_by_cost(np.ones(packs), ranks=ranks, micro_batches=micro_batches, per_micro_batch=False)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_cost_is_refused(cost):
    with pytest.raises(ValueError, match="cost of pack 1 must be finite and 0 or more"):
        assign_by_cost(np.array([1.0, cost]), ranks=2, micro_batches=1, per_micro_batch=False)
