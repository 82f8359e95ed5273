"""The uncertainty of a forecast, against samples whose uncertainty is known."""

from typing import NoReturn

import numpy as np
import pytest

from evenpack.errors import FitError
from evenpack.studies.forecast.bands import Resampling, interval_of_mean
from evenpack.studies.statistics.fits import FITTERS


def test_the_interval_of_a_mean_is_that_of_a_normal_law() -> None:
    """Of 0 and 2, a hundred times each: mean 1, deviation 1.00251, and the mean's is that over the root of 200."""
    found = interval_of_mean(np.repeat([0.0, 2.0], 100))
    reach = 1.959964 * np.sqrt(200 / 199) / np.sqrt(200)
    assert (found.low, found.high) == pytest.approx((1 - reach, 1 + reach))


def test_both_methods_contain_the_slowest_of_normal_ranks() -> None:
    """The expected maximum of two standard normal values is 1/sqrt(pi), of four 1.0294."""
    seconds = np.random.default_rng(3).normal(10.0, 1.0, 800)
    resampling = Resampling(seconds, "normal")
    for ranks, deviations in ((2, 1 / np.sqrt(np.pi)), (4, 1.029375)):
        intervals = resampling.intervals(ranks)
        assert set(intervals) == {"order statistics", "fitted law"}
        for found in intervals.values():
            assert found.low < 10.0 + deviations < found.high
            assert 0.05 < found.high - found.low < 0.4  # an error of the mean of 800 steps, and not of one


def test_a_law_that_fits_no_sample_leaves_the_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_sample: np.ndarray) -> NoReturn:
        raise FitError("does not converge")

    monkeypatch.setitem(FITTERS, "gumbel", fails)
    seconds = np.random.default_rng(3).normal(10.0, 1.0, 60)
    assert set(Resampling(seconds, "gumbel").intervals(4)) == {"order statistics"}
