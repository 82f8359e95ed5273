"""Speed-up on other numbers of devices, from one cluster's Gumbel (PackedBERT, sections 4.4, E) or a run's own log."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy import special

from evenpack.errors import FitError
from evenpack.studies.imbalance.measurement import StepLog
from evenpack.studies.statistics.fits import (
    FITTERS,
    ROUNDS,
    FitReport,
    FittedLaws,
    LawName,
    best_law,
    fit_laws,
    interval,
    resampled,
)
from evenpack.studies.statistics.laws import (
    Gumbel,
    Law,
    expected_maximum,
    expected_maximum_of_draws,
    expected_minima,
    minimum_weights,
)
from evenpack.studies.statistics.paired import Interval

PUBLISHED_CLUSTER = Gumbel(location=1.6038, scale=0.1288)
"""Speed-up of un-padding over padding, BERT-large, batch 32 per device (section E, listing 1)."""
PUBLISHED_DEVICES = 8
PUBLISHED_LENGTHS = "wikipedia_512"
"""Name of the lengths on which it was measured."""

Method = Literal["gumbel", "normal", "generalised_extreme_value", "reference", "empirical"]
_STEPS_IN_TAIL = 20
"""The minimum of k steps is taken from the steps themselves if this many times k were logged."""


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """The expected speed-up at a number of devices."""

    devices: int
    expected: float
    """Expected speed-up by the published inference, by quadrature."""
    by_moments: float
    """Expected speed-up if one device's Gumbel is to match the cluster's mean and deviation instead of its median
    and mode."""
    direct: float
    """Expected speed-up if the cluster is a Gumbel and one device has the law that follows."""
    spread: float
    """Range of the three inferences: the uncertainty from the choice of the law."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """The prediction of one cluster's Gumbel for other counts."""

    fitted: Gumbel
    """Gumbel of the cluster."""
    devices: int
    """Devices of the cluster."""
    single: Gumbel
    """Gumbel of one device, by median and mode."""
    rows: tuple[ReferenceRow, ...]
    expected_at_fitted: float
    """Mean that `single` predicts for the cluster."""
    fitted_mean: float
    """Mean of the cluster's Gumbel."""
    model_error_at_fitted: float
    """Error of the inference: the first minus the second."""

    @property
    def name(self) -> str:
        """Returns a name for people."""
        is_published = (self.fitted, self.devices) == (PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
        return "published (BERT, 512)" if is_published else "reference"


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


def single_device_gumbel_by_moments(cluster: Gumbel, devices: int) -> Gumbel:
    """Returns one device's Gumbel whose minimum of `devices` draws has the cluster's mean and deviation."""
    standard = Gumbel(location=0.0, scale=1.0)
    mean = float(expected_minima(standard, [devices])[0])
    square = float(expected_minima(_Squared(law=standard), [devices])[0])
    scale = math.pi / math.sqrt(6.0) * cluster.scale / math.sqrt(square - mean**2)
    return Gumbel(location=cluster.mean - scale * mean, scale=scale)


def reference_curve(cluster: Gumbel, devices: int, counts: Sequence[int]) -> ReferenceCurve:
    """Returns the expected speed-up of each of `counts` devices, given the Gumbel of a cluster of `devices`."""
    single = single_device_gumbel(cluster, devices)
    rows = []
    for count, expected, by_moments, direct in zip(
        counts,
        expected_minima(single, counts).tolist(),
        expected_minima(single_device_gumbel_by_moments(cluster, devices), counts).tolist(),
        expected_minima(cluster, [count / devices for count in counts]).tolist(),
        strict=True,
    ):
        inferred = (expected, by_moments, direct)
        rows.append(
            ReferenceRow(
                devices=count,
                expected=expected,
                by_moments=by_moments,
                direct=direct,
                spread=max(inferred) - min(inferred),
            )
        )
    expected_at_fitted = float(expected_minima(single, [devices])[0])
    return ReferenceCurve(
        fitted=cluster,
        devices=devices,
        single=single,
        rows=tuple(rows),
        expected_at_fitted=expected_at_fitted,
        fitted_mean=cluster.mean,
        model_error_at_fitted=expected_at_fitted - cluster.mean,
    )


@dataclass(frozen=True, kw_only=True)
class _Squared:
    """The square of the minimum: no law itself, but its expectation is the same integral."""

    law: Gumbel

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        return self.law.at_hazard(hazard) ** 2

    def has_mean(self, devices: float) -> bool:
        return self.law.has_mean(devices)


def _variate(log_survival: float, devices: int) -> float:
    """Returns -ln(-ln F_1) where the cluster's survival function is known."""
    return -math.log(-math.log(-special.expm1(log_survival / devices)))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected speed-up by one method."""

    method: Method
    """The method: a law, which is the cluster's survival function to the power of devices / log_devices;
    "reference", one device's Gumbel by the published inference; or "empirical", minima of logged steps without a
    law."""
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
    """Sequences/s with padding, on `log_devices` devices of the same system."""
    fits: FitReport
    """Fits to the speed-up of each step used."""
    rows: tuple[ForecastRow, ...]
    warnings: tuple[str, ...]
    """Warnings of reading, fitting and extrapolating."""


@dataclass(frozen=True, kw_only=True)
class SlowestForecast:
    """The expected slowest of several devices, whose times are taken as independent draws from the times of one."""

    order_statistics: float
    """Expected maximum of as many draws from the times as they were measured."""
    order_statistics_interval: Interval
    """95 % interval of that, of a bootstrap in blocks of steps, as is the next one."""
    law: LawName
    """The law that fits the times best (AIC)."""
    by_law: float
    """Expected maximum of as many draws from that law."""
    by_law_interval: Interval | None
    """None if no fit of the bootstrap converged."""


def forecast_slowest(
    seconds: Float64[np.ndarray, " draws"], counts: Sequence[int], *, times: int = 1
) -> tuple[SlowestForecast, ...]:
    """Returns a forecast for each number of devices; `times`: how often they wait in a step.

    Raises: FitError if no law can be fitted.
    """
    name, law = best_law(seconds)
    samples = resampled(seconds, rounds=ROUNDS, seed=0)
    laws = []
    for sample in samples:
        with suppress(FitError):
            laws.append(FITTERS[name](sample))
    return tuple(
        SlowestForecast(
            order_statistics=times * expected_maximum_of_draws(seconds, devices),
            order_statistics_interval=interval(
                times * np.array([expected_maximum_of_draws(sample, devices) for sample in samples])
            ),
            law=name,
            by_law=times * expected_maximum(law, devices),
            by_law_interval=interval(times * np.array([expected_maximum(one, devices) for one in laws]))
            if laws
            else None,
        )
        for devices in counts
    )


def forecast_from_log(
    log: StepLog, *, log_devices: int, padded_baseline: float, counts: Sequence[int], rounds: int = ROUNDS
) -> LogForecast:
    """Forecasts the speed-up over padding for each of `counts`, if steps wait for the slowest of independent devices.

    Raises: FitError if no law can be fitted.
    """
    speed_ups = log.rates / padded_baseline
    fitted = fit_laws(speed_ups, rounds=rounds)
    powers = np.array(counts) / log_devices
    columns = _by_laws(fitted, powers) | _by_reference(fitted, counts, log_devices)
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


def _by_laws(fitted: FittedLaws, powers: Float64[np.ndarray, " counts"]) -> dict[Method, list[Estimate]]:
    """Returns estimates by the cluster's law itself: no assumption on one device's, exact at the log's own count."""
    columns: dict[Method, list[Estimate]] = {}
    for fit in fitted.report.fits:
        columns[fit.name] = _estimates(fit.name, fit.law, fitted.resampled[fit.name], powers)
    return columns


def _by_reference(fitted: FittedLaws, counts: Sequence[int], log_devices: int) -> dict[Method, list[Estimate]]:
    gumbel = next((fit.law for fit in fitted.report.fits if isinstance(fit.law, Gumbel)), None)
    if gumbel is None:
        return {}
    singles = [single_device_gumbel(law, log_devices) for law in fitted.resampled["gumbel"] if isinstance(law, Gumbel)]
    single = single_device_gumbel(gumbel, log_devices)
    return {"reference": _estimates("reference", single, singles, np.array(counts, dtype=np.float64))}


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
