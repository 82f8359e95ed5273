"""The report on known laws, and its errors and warnings."""

import math

import numpy as np
import pytest
from scipy import stats

from evenpack.errors import FitError
from evenpack.studies.statistics import fits
from evenpack.studies.statistics.fits import (
    FITTERS,
    FitReport,
    autocorrelation,
    block_length,
    fit_laws,
    resampled,
)
from evenpack.studies.statistics.laws import GeneralisedExtremeValue, Gumbel, Normal


def _gumbel(values: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gumbel(1.6, 0.13, values)


def _autoregressive(values: int, share: float) -> np.ndarray:
    noise = np.random.default_rng(4).normal(size=values)
    series = np.zeros(values)
    for step in range(1, values):
        series[step] = share * series[step - 1] + noise[step]
    return series


def _fit(report: FitReport, name: str) -> fits.DistributionFit:
    return next(fit for fit in report.fits if fit.name == name)


def test_the_gumbel_and_the_normal_are_scipys() -> None:
    values = _gumbel(1000)
    gumbel, normal = Gumbel.fit(values), Normal.fit(values)
    assert [gumbel.location, gumbel.scale] == pytest.approx(list(stats.gumbel_r.fit(values)), abs=1e-6)
    assert [normal.location, normal.scale] == pytest.approx(list(stats.norm.fit(values)))


@pytest.mark.parametrize("shape", [-0.5, -0.2, 0.0, 0.2, 0.5])
def test_the_generalised_extreme_value_law_is_as_likely_as_scipys(shape: float) -> None:
    law = GeneralisedExtremeValue(location=1.6, scale=0.13, shape=shape)
    values = law.at_hazard(np.random.default_rng(2).standard_exponential(1500))
    fitted = GeneralisedExtremeValue.fit(values)
    assert fitted.shape == pytest.approx(shape, abs=0.08)
    found = stats.genextreme(-fitted.shape, fitted.location, fitted.scale).logpdf(values).sum()
    best = stats.genextreme(*stats.genextreme.fit(values, -shape, loc=1.6, scale=0.13)).logpdf(values).sum()
    assert found >= best - 1e-3


def test_a_gumbel_is_recognised() -> None:
    report = fit_laws(_gumbel(800), rounds=60).report
    gumbel, normal = _fit(report, "gumbel"), _fit(report, "normal")
    assert report.values == 800
    assert [fit.aic for fit in report.fits] == sorted(fit.aic for fit in report.fits)
    assert gumbel.aic < normal.aic
    assert gumbel.is_acceptable
    assert not normal.is_acceptable
    assert gumbel.intervals["location"].low < 1.6 < gumbel.intervals["location"].high
    assert gumbel.intervals["scale"].low < 0.13 < gumbel.intervals["scale"].high
    assert report.block_length == 1
    assert report.warnings == ()


def test_a_normal_law_is_recognised() -> None:
    report = fit_laws(np.random.default_rng(3).normal(1.6, 0.1, 800), rounds=60).report
    assert report.best.name == "normal"
    assert _fit(report, "normal").is_acceptable
    assert not _fit(report, "gumbel").is_acceptable


def test_likelihood_and_distance_are_scipys() -> None:
    values = _gumbel(300)
    fit = _fit(fit_laws(values, rounds=20).report, "gumbel")
    frozen = stats.gumbel_r(fit.law.location, fit.law.scale)
    assert fit.log_likelihood == pytest.approx(frozen.logpdf(values).sum())
    assert fit.aic == pytest.approx(4 - 2 * frozen.logpdf(values).sum())
    assert fit.ks_distance == pytest.approx(stats.kstest(values, frozen.cdf).statistic)


def test_the_p_value_allows_for_fitted_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "FITTERS", {"normal": Normal.fit})
    values = np.random.default_rng(6).normal(size=200)
    fit = _fit(fit_laws(values, rounds=400).report, "normal")
    # Lilliefors' test has its own null distribution of the same distance.
    known = stats.goodness_of_fit(stats.norm, values, statistic="ks", n_mc_samples=400, rng=np.random.default_rng(1))
    assert fit.ks_p_value == pytest.approx(known.pvalue, abs=0.1)
    assert fit.ks_p_value < stats.kstest(values, stats.norm(values.mean(), values.std()).cdf).pvalue - 0.1


def test_intervals_are_as_wide_as_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "FITTERS", {"normal": Normal.fit})
    fit = _fit(fit_laws(np.random.default_rng(8).normal(1.6, 0.1, 1000), rounds=200).report, "normal")
    width = fit.intervals["location"].high - fit.intervals["location"].low
    assert width == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(1000), rel=0.2)


def test_no_acceptable_law_is_a_warning() -> None:
    two_humps = np.concatenate([_gumbel(400), _gumbel(400, seed=1) + 2.0])
    report = fit_laws(np.random.default_rng(0).permutation(two_humps), rounds=40).report
    assert not any(fit.is_acceptable for fit in report.fits)
    assert any("no law fits" in warning for warning in report.warnings)


def test_correlated_steps_are_drawn_in_blocks_and_said() -> None:
    values = _autoregressive(1000, 0.8)
    assert autocorrelation(values) == pytest.approx(0.8, abs=0.1)
    assert autocorrelation(values, lag=2) == pytest.approx(0.64, abs=0.15)
    length = block_length(values)
    assert 15 <= length <= 100
    samples = resampled(values, rounds=50, seed=0)
    assert np.isin(samples, values).all()
    position = {value: index for index, value in enumerate(values.tolist())}
    order = np.array([[position[value] for value in sample] for sample in samples[:5].tolist()])
    breaks = (np.diff(order, axis=1) % 1000 != 1).sum(axis=1)
    assert (breaks <= math.ceil(1000 / length) - 1).all()
    assert breaks.min() > 0
    report = fit_laws(values, rounds=20).report
    assert any(f"blocks of {length} steps" in warning for warning in report.warnings)


def test_correlated_steps_have_wider_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "FITTERS", {"normal": Normal.fit})
    values = _autoregressive(1000, 0.8)
    shuffled = np.random.default_rng(0).permutation(values)

    def width(report: FitReport) -> float:
        location = _fit(report, "normal").intervals["location"]
        return location.high - location.low

    assert width(fit_laws(values, rounds=100).report) > 1.8 * width(fit_laws(shuffled, rounds=100).report)


def test_slow_drift_makes_long_blocks() -> None:
    drift = np.random.default_rng(0).normal(size=1000) + np.sin(np.arange(1000) / 150)
    assert block_length(drift) == 100


def test_a_law_that_does_not_converge_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(values: np.ndarray) -> Normal:
        raise FitError("did not converge in 3 iterations")

    monkeypatch.setitem(FITTERS, "generalised_extreme_value", refuse)
    report = fit_laws(_gumbel(200), rounds=20).report
    assert {fit.name for fit in report.fits} == {"gumbel", "normal"}
    assert any("generalised_extreme_value: did not converge" in warning for warning in report.warnings)
    for name in FITTERS:
        monkeypatch.setitem(FITTERS, name, refuse)
    with pytest.raises(FitError, match="no law could be fitted: gumbel: did not converge"):
        fit_laws(_gumbel(200), rounds=20)


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "is_given"), [(0.5, False), (0.02, True)])
def test_a_bootstrap_that_often_fails_gives_no_figures_and_says_so(
    monkeypatch: pytest.MonkeyPatch, failing: float, is_given: bool
) -> None:
    values = _gumbel(200)
    dice = np.random.default_rng(0)

    def moody(sample: np.ndarray) -> Gumbel:
        if dice.random() < failing and not np.array_equal(sample, values):
            raise FitError("no")
        return Gumbel.fit(sample)

    monkeypatch.setitem(FITTERS, "gumbel", moody)
    report = fit_laws(values, rounds=60).report
    fit = _fit(report, "gumbel")
    assert bool(fit.intervals) == is_given
    assert (fit.ks_p_value is not None) == is_given
    assert any("gumbel: too many fits" in warning for warning in report.warnings) != is_given


def test_a_likelihood_without_a_maximum_is_an_error() -> None:
    # All the mass close to a sharp upper end: a shape below -1.
    values = 1.0 - np.random.default_rng(0).standard_exponential(300) ** 2
    with pytest.raises(FitError, match="no maximum"):
        GeneralisedExtremeValue.fit(values)


@pytest.mark.parametrize("values", [[1.0] * 100, [1.0, 2.0], [1.0, math.nan, 2.0, 3.0], [1.0, math.inf, 2.0, 3.0]])
def test_values_without_a_law_are_refused(values: list[float]) -> None:
    with pytest.raises(FitError, match="3 or more finite values that differ"):
        fit_laws(np.array(values))
