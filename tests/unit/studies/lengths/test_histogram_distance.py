"""Distances of histograms agree with values by hand and by loops, and are metrics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import largest_cdf_gap, total_variation


def histogram(*counts: int) -> LengthHistogram:
    return LengthHistogram(counts=np.array(counts, dtype=np.int64))


counts = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


@given(first=counts, second=counts)
def test_the_gap_is_kolmogorovs_and_the_variation_the_greatest_of_any_set(first: list[int], second: list[int]) -> None:
    samples = [[length for length, count in enumerate(values) for _ in range(count)] for values in (first, second)]
    up_to = [[sum(found <= length for found in sample) / len(sample) for length in range(20)] for sample in samples]
    gap = largest_cdf_gap(histogram(*first), histogram(*second))
    variation = total_variation(histogram(*first), histogram(*second))
    assert gap == pytest.approx(max(abs(a - b) for a, b in zip(*up_to, strict=True)))
    shares = [np.pad(np.array(values) / sum(values), (0, 20 - len(values))) for values in (first, second)]
    assert variation == pytest.approx(np.maximum(shares[0] - shares[1], 0).sum())
    assert 0 <= gap <= variation + 1e-12 <= 1 + 1e-9
