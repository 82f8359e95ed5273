"""Expected maxima in known cases."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from evenpack.studies.statistics.fits import best_law
from evenpack.studies.statistics.laws import (
    GeneralisedExtremeValue,
    Gumbel,
    Law,
    Normal,
    expected_maximum,
    expected_maximum_of_draws,
    expected_minima,
)

LAWS: tuple[Any, ...] = (
    Gumbel(location=2.0, scale=0.3),
    Normal(location=2.0, scale=0.3),
    GeneralisedExtremeValue(location=2.0, scale=0.3, shape=-0.3),
    GeneralisedExtremeValue(location=2.0, scale=0.3, shape=0.3),
)


class Uniform:
    """The uniform law between 0 and 1."""

    def at_hazard(self, hazard: np.ndarray) -> np.ndarray:
        return -np.expm1(-hazard)

    def has_mean(self, devices: float) -> bool:
        return devices > 0


def test_the_expected_maximum_of_uniform_draws_is_n_over_n_plus_1() -> None:
    for draws in (1, 2, 7, 100, 2**20):
        assert expected_maximum(Uniform(), draws) == pytest.approx(draws / (draws + 1), abs=1e-14)


def test_the_largest_of_gumbel_draws_is_gumbel_and_lies_ln_n_scales_higher() -> None:
    law = Gumbel(location=2.0, scale=0.3)
    for draws in (1, 4, 64, 2**20):
        assert expected_maximum(law, draws) == pytest.approx(law.mean + 0.3 * math.log(draws), rel=1e-12)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draws", [1, 2, 64])
def test_the_expected_maximum_is_the_integral_over_quantiles(law: Any, draws: int) -> None:
    value, _ = integrate.quad(lambda share: float(law.frozen.ppf(share ** (1.0 / draws))), 0.0, 1.0, limit=500)
    assert expected_maximum(law, draws) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_the_smaller_and_the_larger_of_two_draws_have_the_mean_of_both(law: Law) -> None:
    smaller, larger = float(expected_minima(law, [2])[0]), expected_maximum(law, 2)
    assert smaller + larger == pytest.approx(2 * float(expected_minima(law, [1])[0]), rel=1e-12)
    assert smaller < larger


def test_order_statistics_are_the_mean_over_all_draws_with_replacement() -> None:
    values = np.array([1.0, 4.0, 2.0])
    pairs = [max(first, second) for first in values for second in values]
    assert expected_maximum_of_draws(values, 1) == pytest.approx(values.mean())
    assert expected_maximum_of_draws(values, 2) == pytest.approx(np.mean(pairs))
    assert expected_maximum_of_draws(values, 10_000) == pytest.approx(4.0)


@pytest.mark.parametrize("law", LAWS[:3])
def test_the_law_that_made_the_values_is_found(law: Any) -> None:
    values = law.frozen.rvs(size=4000, random_state=np.random.default_rng(2))
    _, fitted = best_law(values)
    assert type(fitted) is type(law)
    assert expected_maximum(fitted, 16) == pytest.approx(expected_maximum(law, 16), rel=0.01)


def test_a_bounded_law_is_found_where_scipys_own_start_ends_far_off() -> None:
    law = GeneralisedExtremeValue(location=1.6, scale=0.13, shape=-0.5)
    random = np.random.default_rng(3)
    samples = [law.at_hazard(random.standard_exponential(1000)) for _ in range(12)]
    by_default = [stats.genextreme(*stats.genextreme.fit(sample)).logpdf(sample).sum() for sample in samples]
    fitted = [GeneralisedExtremeValue.fit(sample) for sample in samples]
    found = [fit.frozen.logpdf(sample).sum() for fit, sample in zip(fitted, samples, strict=True)]
    assert (np.array(found) - by_default).max() > 100
    assert [fit.shape for fit in fitted] == pytest.approx([-0.5] * 12, abs=0.08)
