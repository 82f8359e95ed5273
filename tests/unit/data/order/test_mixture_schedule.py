"""With weights that change at steps each source remains one stream, in the ratio of the current weights."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.order.mixture import Mixture, MixtureSchedule
from evenpack.data.order.weight_change import WeightChange

ITEMS = 6


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], dict[int, list[int]]]:
    """Draws weights, and other weights from some steps on."""
    sources = draw(st.integers(1, 4))
    weights = st.lists(st.integers(1, 9), min_size=sources, max_size=sources)
    steps = sorted(draw(st.sets(st.integers(2, 12), max_size=4)))
    return draw(weights), {step: draw(weights) for step in steps}


def mixture_of(weights: list[int], changes: dict[int, list[int]]) -> MixtureSchedule:
    entries = [WeightChange(step=step, weights=tuple(one)) for step, one in changes.items()]
    return MixtureSchedule(weights, entries, items_per_step=ITEMS)


@given(schedule=schedules(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_or_repeated_and_every_place_leads_back(schedule, data):
    weights, changes = schedule
    mixture = mixture_of(weights, changes)
    stop = 15 * ITEMS
    sources, positions = mixture.draws(0, stop)
    cuts = sorted(data.draw(st.lists(st.integers(0, stop), max_size=3)))
    parts = [mixture.draws(start, end) for start, end in zip([0, *cuts], [*cuts, stop], strict=True)]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), sources)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), positions)
    for source in range(len(weights)):
        of_source = np.flatnonzero(sources == source)
        np.testing.assert_array_equal(positions[of_source], np.arange(len(of_source)))
        np.testing.assert_array_equal(mixture.draws_of(source, np.arange(len(of_source))), of_source)
        for end in (0, *cuts, stop):
            assert mixture.drawn_before(source, end) == (of_source < end).sum()
    if changes:
        assert [round(share * stop) for share in mixture.shares(stop)] == np.bincount(
            sources, minlength=len(weights)
        ).tolist()


@given(schedule=schedules())
@settings(max_examples=50, deadline=None)
def test_between_two_changes_the_order_is_that_of_a_mixture_of_these_weights(schedule):
    weights, changes = schedule
    mixture = mixture_of(weights, changes)
    spans = pairwise([1, *changes, 20])
    for (first, last), one in zip(spans, [weights, *changes.values()], strict=True):
        sources, _ = mixture.draws((first - 1) * ITEMS, (last - 1) * ITEMS)
        expected, _ = Mixture(one).draws(0, (last - first) * ITEMS)
        np.testing.assert_array_equal(sources, expected)


def test_without_a_change_it_is_the_mixture_itself():
    mixture, plain = MixtureSchedule([3, 1, 2], items_per_step=5), Mixture([3, 1, 2])
    for one, other in zip(mixture.draws(17, 60), plain.draws(17, 60), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [float(share) for share in mixture.shares(7)] == [3 / 6, 1 / 6, 2 / 6]
