"""Stages change what later steps draw and nothing else: streams go on, and each place leads back to its step."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.order.mixture import Mixture
from evenpack.data.order.stages import Numbering, Stage, StagedOrder, changes_by_name, of_the_order

STEPS = 15
Drawn = list[tuple[int, list[int], int]]
"""First step, weights and items of a step for each stage."""


@st.composite
def staged(draw: st.DrawFn) -> Drawn:
    """Draws up to five stages with steps of other sizes, in which sources join, retire and come back."""
    sources = draw(st.integers(1, 4))
    starts = [0, *sorted(draw(st.sets(st.integers(1, STEPS - 1), max_size=4)))]
    weights = st.lists(st.integers(0, 3), min_size=sources, max_size=sources).filter(any)
    return [(start, draw(weights), draw(st.integers(1, 9))) for start in starts]


def stage(step: int, weights: list[int], items: int) -> Stage:
    return Stage(step=step, weights=tuple(weights), items_per_step=items, items_per_micro_batch=1)


def stages_of(drawn_stages: Drawn) -> list[Stage]:
    return [stage(*one) for one in drawn_stages]


def drawn(order: StagedOrder, steps: int) -> list[tuple[int, int, int, int]]:
    """Returns (step, index within it, source, position) of each draw."""
    return [
        (step, index, source, position)
        for step in range(steps)
        for index, (source, position) in enumerate(zip(*(one.tolist() for one in order.draws(step)), strict=True))
    ]


@given(stages=staged())
@settings(max_examples=150)
def test_each_source_is_read_as_one_stream(stages: Drawn):
    order = StagedOrder(stages_of(stages))
    found = drawn(order, STEPS)
    assert [order.items_before(step + 1) - order.items_before(step) for step in range(STEPS)] == [
        sum(one[0] == step for one in found) for step in range(STEPS)
    ]
    for source in range(len(stages[0][1])):
        own = [(step, index) for step, index, of, _ in found if of == source]
        assert [position for _, _, of, position in found if of == source] == list(range(len(own)))
        for step in range(STEPS + 1):
            assert order.drawn_before(source, step) == sum(one < (step, 0) for one in own)
    if len(stages) > 1:
        counts = Counter(source for _, _, source, _ in found)
        assert [share * len(found) for share in order.shares(STEPS)] == [
            counts[at] for at in range(len(order.shares(1)))
        ]


@given(stages=staged(), epoch=st.integers(1, 7))
@settings(max_examples=60)
def test_what_is_read_is_whole_epochs_of_each_source_and_the_beginning_of_one(stages: Drawn, epoch: int):
    """Compares multisets: pack `position % epoch` of each source, whatever the stages drew of it before."""
    found = drawn(StagedOrder(stages_of(stages)), STEPS)
    read = Counter((source, position % epoch) for _, _, source, position in found)
    for source in range(len(stages[0][1])):
        whole, rest = divmod(sum(one[2] == source for one in found), epoch)
        assert [read[source, pack] for pack in range(epoch)] == [whole + (pack < rest) for pack in range(epoch)]


@given(stages=staged())
@settings(max_examples=60)
def test_a_stage_draws_by_the_mixture_of_its_sources_alone(stages: Drawn):
    order, whole = StagedOrder(stages_of(stages)), stages_of(stages)
    # A mixture goes on through stages of the same ratio.
    stages = [one for at, one in enumerate(stages) if at == 0 or whole[at].ratio != whole[at - 1].ratio]
    ends = [*(step for step, _, _ in stages[1:]), STEPS]
    for (first, weights, _), end in zip(stages, ends, strict=True):
        sources = [source for step in range(first, end) for source in order.draws(step)[0].tolist()]
        active = [source for source, weight in enumerate(weights) if weight]
        expected, _ = Mixture([weight for weight in weights if weight]).draws(0, len(sources))
        assert sources == [active[local] for local in expected.tolist()]


def test_only_another_ratio_moves_a_draw():
    """Else a stage of the rate alone would give other data, and a ramp of the batch begin its ratio at every step."""
    plain = [(source, position) for *_, source, position in drawn(StagedOrder([stage(0, [5, 1], 1)]), 60)]
    ramp = [stage(0, [5, 1], 1), stage(2, [5, 1], 1), stage(3, [10, 2], 2), stage(5, [5, 1], 4)]
    found = [(source, position) for *_, source, position in drawn(StagedOrder(ramp), 12)]
    assert found == plain[: len(found)]
    assert [one.step for one in of_the_order(ramp)] == [0, 3, 5]
    assert changes_by_name(["a", "b"], ramp[:2]) == []
    assert changes_by_name(["a", "b"], ramp) == [[4, [["a", 5], ["b", 1]], 2], [6, [["a", 5], ["b", 1]], 4]]


@given(stages=staged(), later=staged())
@settings(max_examples=60)
def test_no_step_depends_on_a_later_stage(stages: Drawn, later: Drawn):
    """Not on one that is added, nor on one that is left out, nor on sources that join in one."""
    border, old = stages[-1][0] + 2, len(stages[0][1])
    longer = [(step, [*weights, *[0] * len(later[0][1])], items) for step, weights, items in stages]
    longer += [(border + step, [*[1] * old, *weights], items) for step, weights, items in later]
    order = StagedOrder(stages_of(longer))
    assert drawn(order, border) == drawn(StagedOrder(stages_of(stages)), border)
    assert [one.step for one in order.begun(border)] == [step for step, _, _ in stages]


def test_one_stage_is_the_mixture_itself():
    order, plain = StagedOrder([stage(0, [3, 1, 2], 5)]), Mixture([3, 1, 2])
    for step in (0, 7):
        for one, other in zip(order.draws(step), plain.draws(5 * step, 5 * step + 5), strict=True):
            np.testing.assert_array_equal(one, other)
    assert [float(share) for share in order.shares(7)] == [3 / 6, 1 / 6, 2 / 6]


@given(starts=st.sets(st.integers(1, 20), max_size=4), data=st.data())
def test_numbers_and_places_lead_to_one_another(starts: set[int], data: st.DataObject):
    firsts = [0, *sorted(starts)]
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=len(firsts), max_size=len(firsts)))
    numbering = Numbering(firsts, sizes)
    of_steps = [
        next(size for first, size in reversed(list(zip(firsts, sizes, strict=True))) if first <= step)
        for step in range(25)
    ]
    assert [numbering.size(step) for step in range(25)] == of_steps
    borders = [0, *accumulate(of_steps)]
    assert [numbering.before(step) for step in range(26)] == borders
    for step, (start, stop) in enumerate(pairwise(borders)):
        assert [numbering.place(number) for number in range(start, stop)] == [(step, at) for at in range(stop - start)]
