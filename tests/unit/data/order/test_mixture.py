"""Every prefix of the mixture is as near to the ratio as possible, from any start."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenpack.data.order.mixture import Mixture
from evenpack.errors import ConfigError

WEIGHTS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 300)), min_size=1, max_size=12)


def misses(order: np.ndarray, weights: tuple[int, ...]) -> np.ndarray:
    """Returns |draws so far x period - prefix x weight| for each prefix and source, exact, in 1 / period draws."""
    drawn = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    prefix = np.arange(1, len(order) + 1)
    return np.abs(drawn * sum(weights) - prefix[:, None] * np.array(weights))


def largest_deficit_first(weights: tuple[int, ...], count: int) -> np.ndarray:
    drawn = np.zeros(len(weights), dtype=np.int64)
    order = np.empty(count, dtype=np.int64)
    for place in range(count):
        order[place] = np.argmax((place + 1) * np.array(weights) - drawn * sum(weights))
        drawn[order[place]] += 1
    return order


@given(weights=WEIGHTS, start=st.integers(0, 2_000))
@example(weights=[25] * 5 + [5] * 5 + [1] * 5, start=0)
@example(weights=[999, 1, 1], start=998)
@settings(max_examples=150)
def test_every_prefix_is_within_one_draw_of_the_ratio(weights, start):
    mixture = Mixture(weights)
    sources, _ = mixture.draws(0, start + 2 * mixture.period + 3)
    worst = misses(sources, mixture.weights).max()
    assert worst < mixture.period
    if len(weights) > 1:
        unit = 2 * len(weights) - 2
        assert worst * unit <= mixture.period * (unit - 1)  # Tijdeman's bound, exact in integers
    sources_later, _ = mixture.draws(start, start + 2 * mixture.period + 3)
    np.testing.assert_array_equal(sources_later, sources[start:])


def test_the_measure_catches_an_order_that_misses():
    weights = tuple([25] * 5 + [5] * 5 + [1] * 5)
    assert misses(largest_deficit_first(weights, sum(weights)), weights).max() > sum(weights)


@given(weights=WEIGHTS, data=st.data())
@settings(max_examples=60)
def test_each_source_is_drawn_as_one_stream_however_the_draws_are_cut(weights, data):
    mixture = Mixture(weights)
    stop = 2 * mixture.period + 1
    sources, positions = mixture.draws(0, stop)
    for source in range(len(weights)):
        np.testing.assert_array_equal(positions[sources == source], np.arange((sources == source).sum()))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, stop), max_size=5))), stop]
    parts = [mixture.draws(start, end) for start, end in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), sources)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), positions)


def test_far_draws_continue_the_period():
    mixture = Mixture([3, 2])
    far = 10**15
    sources, positions = mixture.draws(far * 5, far * 5 + 5)
    near_sources, near_positions = mixture.draws(0, 5)
    np.testing.assert_array_equal(sources, near_sources)
    np.testing.assert_array_equal(positions, near_positions + far * np.array([3, 2])[sources])


def test_the_order_is_fixed():
    """A changed order would change every run that is resumed."""
    assert Mixture([3, 2]).order.tolist() == [0, 1, 0, 1, 0]
    assert Mixture([4, 2, 1]).order.tolist() == [0, 1, 0, 0, 2, 0, 1]


def test_common_divisors_do_not_count():
    assert Mixture([300, 200]).weights == (3, 2)
    assert Mixture([7]).order.tolist() == [0]
    np.testing.assert_array_equal(Mixture([30, 20, 10]).order, Mixture([3, 2, 1]).order)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "found no source"),
        ([1, 0], "found weight 0 for source 1"),
        ([-2], "found weight -2 for source 0"),
        ([3_000_001, 2_000_000], r"repeat only after 5000001 draws.*rounder weights"),
    ],
)
def test_weights_without_an_order_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Mixture(weights)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_a_range_of_draws_runs_forward_from_zero(start, stop):
    with pytest.raises(ValueError, match=f"start {start} and stop {stop}"):
        Mixture([1]).draws(start, stop)


@given(weights=WEIGHTS, data=st.data())
@settings(max_examples=60)
def test_the_draws_of_a_source_before_any_are_counted(weights, data):
    mixture = Mixture(weights)
    stop = data.draw(st.integers(0, 2 * mixture.period + 1))
    sources, _ = mixture.draws(0, stop)
    for source in range(len(weights)):
        assert mixture.drawn_before(source, stop) == np.count_nonzero(sources == source)
