"""Expected maxima of values, and a law that is hard to fit."""

import numpy as np
import pytest
from scipy import stats

from evenpack.studies.statistics.laws import GeneralisedExtremeValue, minimum_weights


def test_order_statistics_are_the_mean_over_all_draws_with_replacement() -> None:
    values = np.array([4.0, 2.0, 1.0])
    pairs = [max(first, second) for first in values for second in values]
    assert values @ minimum_weights(3, 1) == pytest.approx(values.mean())
    assert values @ minimum_weights(3, 2) == pytest.approx(np.mean(pairs))
    assert values @ minimum_weights(3, 10_000) == pytest.approx(4.0)


def test_a_bounded_law_is_found_where_scipys_own_start_ends_far_off() -> None:
    law = GeneralisedExtremeValue(location=1.6, scale=0.13, shape=-0.5)
    random = np.random.default_rng(3)
    samples = [law.at_hazard(random.standard_exponential(1000)) for _ in range(12)]
    by_default = [stats.genextreme(*stats.genextreme.fit(sample)).logpdf(sample).sum() for sample in samples]
    fitted = [GeneralisedExtremeValue.fit(sample) for sample in samples]
    found = [fit.frozen.logpdf(sample).sum() for fit, sample in zip(fitted, samples, strict=True)]
    assert (np.array(found) - by_default).max() > 100
    assert [fit.shape for fit in fitted] == pytest.approx([-0.5] * 12, abs=0.08)
