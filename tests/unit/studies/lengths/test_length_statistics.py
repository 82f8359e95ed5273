"""Statistics of a histogram's lengths and padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import length_statistics

some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def histogram(lengths: list[int]) -> LengthHistogram:
    return LengthHistogram.from_lengths(lengths, longest=max(lengths))


@given(some_lengths)
def test_statistics_are_those_of_the_list(lengths: list[int]) -> None:
    found = length_statistics(histogram(lengths), pack_length=40)
    ordered = sorted(lengths)
    assert (found.sequences, found.tokens) == (len(lengths), sum(lengths))
    assert (found.shortest, found.longest) == (ordered[0], ordered[-1])
    assert found.mean == pytest.approx(np.mean(lengths))
    assert found.median == ordered[(len(lengths) + 1) // 2 - 1]
    assert sum(length <= found.percentile_90 for length in lengths) >= 0.9 * len(lengths)
    assert sum(length < found.percentile_90 for length in lengths) < 0.9 * len(lengths)
    assert found.padding_share == pytest.approx(1 - sum(lengths) / (40 * len(lengths)))
    assert found.speed_up_limit == pytest.approx(1 / (1 - found.padding_share))
