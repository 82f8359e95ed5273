"""Steps drawn again in blocks, and the intervals that follow."""

import math

import numpy as np
import pytest

from evenpack.studies.statistics.paired import Interval
from evenpack.studies.statistics.resampling import autocorrelation, block_length, interval, resampled


def _autoregressive(values: int, share: float) -> np.ndarray:
    noise = np.random.default_rng(4).normal(size=values)
    series = np.zeros(values)
    for step in range(1, values):
        series[step] = share * series[step - 1] + noise[step]
    return series


def _of_the_mean(values: np.ndarray) -> Interval:
    return interval(resampled(values, rounds=200, seed=0).mean(axis=1))


def test_intervals_are_as_wide_as_theory_says() -> None:
    found = _of_the_mean(np.random.default_rng(8).normal(1.6, 0.1, 1000))
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(1000), rel=0.2)
    assert found.low < 1.6 < found.high


def test_correlated_steps_are_drawn_in_blocks() -> None:
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


def test_slow_drift_makes_long_blocks() -> None:
    drift = np.random.default_rng(0).normal(size=1000) + np.sin(np.arange(1000) / 150)
    assert block_length(drift) == 100
