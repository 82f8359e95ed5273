"""The published inference agrees with independent integration, draws and the published figures."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.stats.distributions import rv_frozen

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.extrapolation import (
    PUBLISHED_CLUSTER,
    published_curve,
    single_device_gumbel,
)
from evenpack.studies.statistics.laws import Gumbel, expected_minima, ks_distance

POWERS = [2**power for power in range(12)]
PUBLISHED_ROW = [2.12, 1.90, 1.76, 1.65, 1.57, 1.51, 1.46, 1.41, 1.37, 1.34, 1.30, 1.28]


def _integral(function: Callable[[float], float], frozen: rv_frozen, devices: float | int) -> float:
    """Integrates over the whole line, divided where a minimum of so many draws has its mass."""
    shares = -np.expm1(np.log([1 - 1e-12, 0.999, 0.5, 1e-3, 1e-9, 1e-25]) / devices)
    cuts = np.where(shares < 0.9, frozen.ppf(shares), frozen.isf(1 - shares)).tolist()
    edges = [*cuts, min(cuts[-1] + 50.0, float(frozen.support()[1]))]
    return sum(
        integrate.quad(function, low, high, epsabs=1e-10, limit=500)[0] for low, high in itertools.pairwise(edges)
    )


def _by_density(frozen: rv_frozen, devices: float | int) -> float:
    """Returns E[min] = integral of s n f(s) (1 - F(s))^(n - 1)."""

    def integrand(speed_up: float) -> float:
        log_density = math.log(devices) + frozen.logpdf(speed_up) + (devices - 1) * _log_survival(frozen, speed_up)
        return speed_up * math.exp(log_density) if math.isfinite(log_density) else 0.0

    return _integral(integrand, frozen, devices)


def _by_survival(frozen: rv_frozen, devices: float | int) -> float:
    """Returns E[min] = low + integral of (1 - F(s))^n from `low` on, below which there is almost no mass."""
    low = float(frozen.ppf(-math.expm1(math.log(1 - 1e-12) / devices)))
    return low + _integral(lambda speed_up: math.exp(devices * _log_survival(frozen, speed_up)), frozen, devices)


def _log_survival(frozen: rv_frozen, speed_up: float) -> float:
    share = float(frozen.cdf(speed_up))
    return math.log1p(-share) if share < 0.9 else float(frozen.logsf(speed_up))


@pytest.mark.parametrize("devices", [0.5, 1, 8, 2**20])
def test_the_expected_minimum_is_that_of_two_other_integrals(devices: float | int) -> None:
    (expected,) = expected_minima(Gumbel(location=1.94, scale=0.318), [devices])
    frozen = stats.gumbel_r(1.94, 0.318)
    assert expected == pytest.approx(_by_density(frozen, devices), abs=1e-7)
    assert expected == pytest.approx(_by_survival(frozen, devices), abs=1e-7)


def test_the_expected_minimum_has_known_values() -> None:
    standard = Gumbel(location=0.0, scale=1.0)
    # E[min of 2] = 2 E[X] - E[max of 2], and the maximum of Gumbels is a Gumbel shifted by ln 2.
    assert expected_minima(standard, [1, 2]) == pytest.approx([np.euler_gamma, np.euler_gamma - math.log(2.0)])


def test_the_fit_and_the_distance_are_scipys() -> None:
    values = np.random.default_rng(0).gumbel(1.6, 0.13, 1000)
    fitted = Gumbel.fit(values)
    assert [fitted.location, fitted.scale] == pytest.approx(list(stats.gumbel_r.fit(values)), abs=1e-6)
    distance = stats.kstest(values, stats.gumbel_r(fitted.location, fitted.scale).cdf).statistic
    assert ks_distance(fitted.frozen, values) == pytest.approx(distance)


@pytest.mark.parametrize("devices", [1, 2, 8, 4096])
def test_one_device_solves_both_equations_of_the_paper(devices: int) -> None:
    cluster = PUBLISHED_CLUSTER
    single = single_device_gumbel(cluster, devices)
    frozen = stats.gumbel_r(single.location, single.scale)
    median = cluster.location - cluster.scale * math.log(math.log(2.0))
    assert devices * frozen.logsf(median) == pytest.approx(math.log(0.5))
    assert devices * frozen.logsf(cluster.location) == pytest.approx(math.log(1 - math.exp(-1.0)))


def test_the_curve_is_the_published_one_and_draws_agree() -> None:
    curve = published_curve(POWERS)
    assert [row.devices for row in curve.rows] == POWERS
    assert [row.expected for row in curve.rows] == pytest.approx(PUBLISHED_ROW, abs=0.01)
    random = np.random.default_rng(0)
    for row in curve.rows:
        drawn = random.gumbel(
            curve.single.location, curve.single.scale, (min(100_000, 2**21 // row.devices), row.devices)
        )
        minima = drawn.min(axis=1)
        assert abs(minima.mean() - row.expected) < 4 * minima.std() / math.sqrt(len(minima))


def test_the_error_at_the_fitted_count_is_reported() -> None:
    curve = published_curve([8])
    assert curve.expected_at_fitted == pytest.approx(1.654, abs=5e-4)
    assert curve.fitted_mean == pytest.approx(1.678, abs=5e-4)


def test_of_one_device_everything_is_the_cluster_itself() -> None:
    single = single_device_gumbel(PUBLISHED_CLUSTER, 1)
    assert [single.location, single.scale] == pytest.approx([1.6038, 0.1288])


@pytest.mark.parametrize(("location", "scale"), [(math.nan, 1.0), (1.0, 0.0), (1.0, -0.1), (1.0, math.inf)])
def test_a_gumbel_without_sense_is_refused(location: float, scale: float) -> None:
    with pytest.raises(ConfigError, match="scale above 0"):
        Gumbel(location=location, scale=scale)
