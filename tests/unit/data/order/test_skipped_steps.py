"""Spans of skipped steps agree with plain sets of numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.order.skipped_steps import SkippedSteps

NUMBERS = st.integers(1, 30)
ENTRIES = st.lists(st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS).map(lambda ends: (min(ends), max(ends)))), max_size=6)


def as_set(steps: SkippedSteps) -> set[int]:
    return {step for span in steps.spans for step in range(*span)}


@given(one=ENTRIES, other=ENTRIES, start=st.integers(0, 30), stop=st.integers(0, 30))
@settings(max_examples=200)
def test_stretches_are_what_sets_of_numbers_are(one, other, start, stop):
    skipped, rest = SkippedSteps.named(one), SkippedSteps.named(other)
    named = {entry for entry in one if isinstance(entry, int)}
    named |= {number for entry in one if not isinstance(entry, int) for number in range(entry[0], entry[1] + 1)}
    steps = {number - 1 for number in named}
    assert as_set(skipped) == steps
    assert {step for step in range(40) if step in skipped} == steps
    assert as_set(skipped.before(stop)) == {step for step in steps if step < stop}
    assert as_set(skipped.without(rest)) == steps - as_set(rest)
    gaps = [step for gap in skipped.gaps(start, stop) for step in range(*gap)]
    assert gaps == [step for step in range(start, stop) if step not in steps]
    assert bool(skipped) == bool(steps)
    assert SkippedSteps.named(named) == skipped  # one form for each set


def test_stretches_are_described_in_words():
    assert str(SkippedSteps.named([7, (3, 4), 5])) == "3 to 5, 7"
    assert str(SkippedSteps.named([])) == "none"
