"""Forecasts from logs of clusters whose other sizes are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from evenpack.console import plain as plain_values
from evenpack.studies.imbalance.extrapolation import (
    Estimate,
    ForecastRow,
    LogForecast,
    forecast_from_log,
)
from evenpack.studies.imbalance.measurement import StepLog
from evenpack.studies.statistics import fits
from evenpack.studies.statistics.laws import Gumbel, expected_minima

BASELINE = 250.0


def _log(speed_ups: np.ndarray, *, devices: int | None = None) -> StepLog:
    return StepLog(
        path=Path("run/metrics.jsonl"),
        format="a test",
        steps_read=len(speed_ups) + 7,
        rates=BASELINE * speed_ups,
        every_rate=BASELINE * speed_ups,
        cuts={},
        warnings=("said by the reader",),
        devices=devices,
        sequences_per_step=None,
        wait_share=None,
    )


def _forecast(speed_ups: np.ndarray, counts: list[int], *, log_devices: int = 8, rounds: int = 12) -> LogForecast:
    return forecast_from_log(
        _log(speed_ups), log_devices=log_devices, padded_baseline=BASELINE, counts=counts, rounds=rounds
    )


def _estimate(row: ForecastRow, method: str) -> Estimate:
    return next(estimate for estimate in row.estimates if estimate.method == method)


def _minima(devices: int, steps: int, seed: int = 0) -> np.ndarray:
    """Returns speed-ups of a cluster of normal devices, where a step is the minimum of `devices` normal draws."""
    return np.random.default_rng(seed).normal(1.9, 0.15, (steps, devices)).min(axis=1)


def test_the_best_law_forecasts_larger_clusters_that_were_not_fitted() -> None:
    for row in _forecast(_minima(8, 3000), [16, 32, 128, 512], rounds=5).rows:
        truth = _minima(row.devices, 1 + 2_000_000 // row.devices, seed=9).mean()
        assert row.best.expected == pytest.approx(truth, rel=0.02)
        assert _estimate(row, "empirical").expected == pytest.approx(truth, rel=0.012)


def test_a_law_that_the_steps_contradict_is_warned_of() -> None:
    assert any("minima of the logged steps" in warning for warning in _forecast(_minima(8, 3000), [16, 512]).warnings)
    gumbel = np.random.default_rng(1).gumbel(1.6, 0.13, 3000)
    assert not any("minima of the logged" in warning for warning in _forecast(gumbel, [8, 16, 512]).warnings)


def test_the_range_over_all_methods_is_near_smaller_clusters() -> None:
    for row in _forecast(_minima(8, 3000), [1, 2, 4], rounds=5).rows:
        truth = _minima(row.devices, 400_000, seed=9).mean()
        assert 0.995 * row.lowest < truth < 1.005 * row.highest


def test_at_the_logs_own_count_the_mean_is_forecast() -> None:
    speed_ups = _minima(8, 1000)
    (row,) = _forecast(speed_ups, [8]).rows
    assert not row.extrapolated
    assert row.best.expected == pytest.approx(speed_ups.mean(), abs=0.002)
    assert _estimate(row, "empirical").expected == pytest.approx(speed_ups.mean())
    assert row.best.interval is not None
    assert row.best.interval.low < speed_ups.mean() < row.best.interval.high


def test_minima_of_logged_steps_are_those_of_drawn_steps() -> None:
    speed_ups = _minima(4, 400)
    drawn = np.random.default_rng(2).choice(speed_ups, (200_000, 5)).min(axis=1)
    (row,) = _forecast(speed_ups, [20], log_devices=4).rows
    assert _estimate(row, "empirical").expected == pytest.approx(drawn.mean(), abs=5 * drawn.std() / math.sqrt(2e5))


def test_extrapolation_is_marked_and_warned_of() -> None:
    forecast = _forecast(_minima(8, 400), [4, 8, 160, 161])
    assert [row.extrapolated for row in forecast.rows] == [True, False, False, True]
    assert ["empirical" in [e.method for e in row.estimates] for row in forecast.rows] == [False, True, True, False]
    assert any("below 8 devices" in warning for warning in forecast.warnings)
    assert any("from 161 devices on" in warning for warning in forecast.warnings)
    within = _forecast(_minima(8, 400), [8, 16])
    assert not any("devices" in warning for warning in within.warnings)
    assert "said by the reader" in within.warnings


def test_the_range_holds_every_estimate_and_interval() -> None:
    for row in _forecast(_minima(8, 400), [1, 8, 512]).rows:
        for estimate in row.estimates:
            assert estimate.interval is not None
            assert estimate.interval.low <= estimate.interval.high
            assert row.lowest <= estimate.interval.low
            assert estimate.interval.high <= row.highest
        assert row.best in row.estimates


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "FITTERS", {"gumbel": Gumbel.fit})
    truth = float(expected_minima(Gumbel(location=1.6, scale=0.13), [8.0])[0])
    hits = 0
    for seed in range(12):
        speed_ups = np.random.default_rng(seed).gumbel(1.6, 0.13, 300)
        (row,) = _forecast(speed_ups, [64], rounds=40).rows
        held = _estimate(row, "gumbel").interval
        assert held is not None
        hits += held.low <= truth <= held.high
    assert hits >= 9


def test_a_law_without_a_mean_forecasts_nothing_there_and_says_so() -> None:
    heavy = np.random.default_rng(0).pareto(4.0, 2000) + 1.0
    forecast = _forecast(heavy, [1, 8])
    assert forecast.fits.best.name == "generalised_extreme_value"
    assert math.isinf(forecast.rows[0].best.expected)
    assert math.isfinite(forecast.rows[1].best.expected)
    assert any("no finite mean at 1 devices" in warning for warning in forecast.warnings)
    plain = json.loads(json.dumps(plain_values(forecast), allow_nan=False))
    assert plain["rows"][0]["best"]["expected"] is None
