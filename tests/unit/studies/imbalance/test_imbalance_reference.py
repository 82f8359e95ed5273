"""The published inference agrees with independent integration, draws and the published figures."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.extrapolation import PUBLISHED_CLUSTER, published_curve, single_device_gumbel
from evenpack.studies.statistics.laws import Gumbel, expected_minima, ks_distance

POWERS = [2**power for power in range(12)]
PUBLISHED_ROW = [2.12, 1.90, 1.76, 1.65, 1.57, 1.51, 1.46, 1.41, 1.37, 1.34, 1.30, 1.28]


@pytest.mark.parametrize("devices", [0.5, 1, 2, 8, 2**20])
def test_the_expected_minimum_is_the_integral_of_its_quantiles(devices: float | int) -> None:
    frozen = stats.gumbel_r(1.94, 0.318)

    def of_minimum(share: float) -> float:
        """Returns the quantile, by whichever tail of one draw is exact."""
        survival = math.exp(math.log1p(-share) / devices)
        return float(frozen.isf(survival) if survival < 0.5 else frozen.ppf(-math.expm1(math.log1p(-share) / devices)))

    expected, _ = integrate.quad(of_minimum, 0, 1, epsabs=1e-9, limit=500)
    assert expected_minima(Gumbel(location=1.94, scale=0.318), [devices])[0] == pytest.approx(expected, abs=1e-7)


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
