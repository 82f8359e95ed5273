"""Spans of skipped steps agree with plain sets of numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from evenpack.data.order.skipped_steps import SkippedSteps

STEPS = st.integers(1, 30)
ENTRIES = st.lists(st.one_of(STEPS, st.tuples(STEPS, STEPS).map(lambda ends: (min(ends), max(ends)))), max_size=6)


def as_set(steps: SkippedSteps) -> set[int]:
    return {step for first, last in steps.spans for step in range(first, last + 1)}


@given(one=ENTRIES, other=ENTRIES, first=STEPS, last=STEPS)
@settings(max_examples=200, deadline=None)
def test_stretches_are_what_sets_of_numbers_are(one, other, first, last):
    skipped, rest = SkippedSteps.of(one), SkippedSteps.of(other)
    numbers = {step for entry in one for step in ([entry] if isinstance(entry, int) else range(entry[0], entry[1] + 1))}
    assert as_set(skipped) == numbers
    assert {step for step in range(40) if step in skipped} == numbers
    assert as_set(skipped.up_to(last)) == {step for step in numbers if step <= last}
    assert as_set(skipped.without(rest)) == numbers - as_set(rest)
    gaps = [step for begin, end in skipped.gaps(first, last) for step in range(begin, end + 1)]
    assert gaps == [step for step in range(first, last + 1) if step not in numbers]
    assert bool(skipped) == bool(numbers)
    assert SkippedSteps.of(numbers) == skipped  # one form for each set


def test_stretches_are_described_in_words():
    assert str(SkippedSteps.of([7, (3, 4), 5])) == "3 to 5, 7"
    assert str(SkippedSteps.of([])) == "none"
