"""Speed-up on other numbers of devices, from one cluster's Gumbel (PackedBERT, sections 4.4, E) or a run's own log."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy import special

from evenpack.studies.imbalance.measurement import StepLog
from evenpack.studies.statistics.fits import (
    ROUNDS,
    FitReport,
    fit_laws,
    interval,
)
from evenpack.studies.statistics.laws import (
    Gumbel,
    Law,
    expected_minima,
    minimum_weights,
)
from evenpack.studies.statistics.paired import Interval

PUBLISHED_CLUSTER = Gumbel(location=1.6038, scale=0.1288)
"""Speed-up of un-padding over padding, BERT-large, batch 32 per device (section E, listing 1)."""
PUBLISHED_DEVICES = 8
PUBLISHED_LENGTHS = "wikipedia_512"
"""Name of the lengths on which it was measured."""

Method = Literal["gumbel", "normal", "generalised_extreme_value", "empirical", "without_levels"]
_STEPS_IN_TAIL = 20
"""The minimum of k steps is taken from the steps themselves if this many times k were logged."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """The expected speed-up at a number of devices."""

    devices: int
    expected: float
    """By the published inference of one device's law, by quadrature."""
    direct: float
    """If the cluster of 8 is a Gumbel and one device has the law that follows."""


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """The published speed-up of un-padding by number of devices, inferred from 8."""

    fitted: Gumbel
    """Law of the 8."""
    single: Gumbel
    """Law of one device, by median and mode."""
    rows: tuple[PublishedRow, ...]
    expected_at_fitted: float
    """Mean that `single` predicts for the 8."""
    fitted_mean: float
    """Mean of their Gumbel; what `single` predicts differs by the error of the inference."""


def single_device_gumbel(cluster: Gumbel, devices: int) -> Gumbel:
    """Returns one device's Gumbel from the Gumbel of `devices` (equations 12 to 14), in closed form.

    1 - F_n(s) = (1 - F_1(s))^n holds at the cluster's median and mode. There F_1 is known, and -ln(-ln F_1) =
    (s - location) / scale is linear in s, so both equations together are a straight line through two points.
    """
    median = cluster.location - cluster.scale * math.log(math.log(2.0))
    at_median = _variate(math.log(0.5), devices)
    at_mode = _variate(math.log1p(-math.exp(-1.0)), devices)
    scale = (median - cluster.location) / (at_median - at_mode)
    return Gumbel(location=cluster.location - scale * at_mode, scale=scale)


def published_curve(counts: Sequence[int]) -> PublishedCurve:
    """Returns the expected speed-up of each of `counts` devices."""
    single = single_device_gumbel(PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
    inferred = expected_minima(single, [*counts, PUBLISHED_DEVICES]).tolist()
    direct = expected_minima(PUBLISHED_CLUSTER, [count / PUBLISHED_DEVICES for count in counts]).tolist()
    rows = [
        PublishedRow(devices=count, expected=one, direct=other)
        for count, one, other in zip(counts, inferred, direct, strict=False)
    ]
    return PublishedCurve(
        fitted=PUBLISHED_CLUSTER,
        single=single,
        rows=tuple(rows),
        expected_at_fitted=inferred[-1],
        fitted_mean=PUBLISHED_CLUSTER.mean,
    )


def _variate(log_survival: float, devices: int) -> float:
    """Returns -ln(-ln F_1) where the cluster's survival function is known."""
    return -math.log(-math.log(-special.expm1(log_survival / devices)))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected speed-up by one method."""

    method: Method
    """Name: a law, which is the cluster's survival function to the power of devices / log_devices;
    "empirical", minima of logged steps without a
    law; "without_levels", regimes at one level (`regimes.py`)."""
    expected: float
    """Expected speed-up; infinite where the law has no mean."""
    interval: Interval | None
    """95 % interval of the fit, not of the choice of the law; None if too many of its fits failed."""

    @property
    def ends(self) -> Interval:
        """Returns the interval; without one, the expected speed-up alone."""
        return self.interval or Interval(low=self.expected, high=self.expected)


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """The expected speed-up at a number of devices."""

    devices: int
    best: Estimate
    """Estimate by the law with the lowest AIC."""
    estimates: tuple[Estimate, ...]
    """Estimates by all methods that apply."""
    extrapolated: bool
    """Whether the number is below the log's devices, or beyond the reach of minima of its steps."""
    lowest: float
    """Lowest value of all estimates and their intervals."""
    highest: float


@dataclass(frozen=True, kw_only=True)
class LogForecast:
    """The forecasts of a log for other numbers of devices."""

    log_devices: int
    padded_baseline: float
    """Sequences/s that the speed-ups are over: with padding, on `log_devices` devices, else the log's own."""
    fits: FitReport
    """Fits to the speed-up of each step used."""
    rows: tuple[ForecastRow, ...]
    warnings: tuple[str, ...]
    """Warnings of reading, fitting and extrapolating."""


def forecast_from_log(
    log: StepLog, *, log_devices: int, padded_baseline: float, counts: Sequence[int], rounds: int = ROUNDS
) -> LogForecast:
    """Forecasts the speed-up over padding for each of `counts`, if steps wait for the slowest of independent devices.

    Raises: FitError if no law can be fitted.
    """
    speed_ups = log.rates / padded_baseline
    fitted = fit_laws(speed_ups, rounds=rounds)
    powers = np.array(counts) / log_devices
    # The cluster's law itself: no assumption on one device's, and exact at the log's own count.
    columns: dict[Method, list[Estimate]] = {
        fit.name: _estimates(fit.name, fit.law, fitted.resampled[fit.name], powers) for fit in fitted.report.fits
    }
    best = columns[fitted.report.best.name]
    rows = []
    for index, (devices, empirical) in enumerate(
        zip(counts, _by_steps(speed_ups, fitted.samples, powers), strict=True)
    ):
        estimates = (*(column[index] for column in columns.values()), *empirical)
        rows.append(
            ForecastRow(
                devices=devices,
                best=best[index],
                estimates=estimates,
                extrapolated=not empirical,
                lowest=min(estimate.ends.low for estimate in estimates),
                highest=max(estimate.ends.high for estimate in estimates),
            )
        )
    return LogForecast(
        log_devices=log_devices,
        padded_baseline=padded_baseline,
        fits=fitted.report,
        rows=tuple(rows),
        warnings=(*log.warnings, *fitted.report.warnings, *_forecast_warnings(rows, log_devices)),
    )


def _estimates(
    method: Method, law: Law, resampled: Sequence[Law], draws: Float64[np.ndarray, " counts"]
) -> list[Estimate]:
    sizes = draws.tolist()
    expected = expected_minima(law, sizes).tolist()
    again = np.array([expected_minima(other, sizes) for other in resampled]).reshape(len(resampled), len(sizes))
    return [
        Estimate(method=method, expected=value, interval=interval(again[:, index]) if len(resampled) else None)
        for index, value in enumerate(expected)
    ]


def _by_steps(
    speed_ups: Float64[np.ndarray, " steps"],
    samples: Float64[np.ndarray, "rounds steps"],
    powers: Float64[np.ndarray, " counts"],
) -> list[tuple[Estimate, ...]]:
    """Returns the expected minimum of k logged steps, with replacement; nothing where k is below 1 or too large."""
    steps = len(speed_ups)
    ordered, samples = np.sort(speed_ups), np.sort(samples, axis=1)
    estimates: list[tuple[Estimate, ...]] = []
    for power in powers.tolist():
        if not 1 <= power <= steps / _STEPS_IN_TAIL:
            estimates.append(())
            continue
        weights = minimum_weights(steps, power)
        estimates.append(
            (Estimate(method="empirical", expected=float(ordered @ weights), interval=interval(samples @ weights)),)
        )
    return estimates


def _forecast_warnings(rows: Sequence[ForecastRow], log_devices: int) -> list[str]:
    warnings = []
    if any(row.devices < log_devices for row in rows):
        warnings.append(
            f"below {log_devices} devices the upper tail of the law decides, which steps of {log_devices} devices "
            "hardly show: use the range over all methods, not one of them, and with care"
        )
    far = [row.devices for row in rows if row.extrapolated and row.devices > log_devices]
    if far:
        warnings.append(
            f"from {min(far)} devices on fewer than {_STEPS_IN_TAIL} logged steps are as slow as the forecast: the law "
            "alone decides"
        )
    apart = [row.devices for row in rows if not _agree(row)]
    if apart:
        warnings.append(
            f"at {', '.join(map(str, apart))} devices the best law, {rows[0].best.method}, is outside what minima of "
            "the logged steps themselves give (empirical): the law's tail is wrong there, and beyond"
        )
    endless = [row.devices for row in rows if math.isinf(row.best.expected)]
    if endless:
        warnings.append(f"the best law has no finite mean at {', '.join(map(str, endless))} devices: no forecast there")
    return warnings


def _agree(row: ForecastRow) -> bool:
    """Returns whether the best law's interval and the interval of the steps, if there is one, overlap."""
    best = row.best.ends
    steps = [estimate.ends for estimate in row.estimates if estimate.method == "empirical"]
    return all(best.low <= one.high and one.low <= best.high for one in steps)
