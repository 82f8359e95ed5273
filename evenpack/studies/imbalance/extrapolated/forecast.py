"""Forecasts the speed-up on other numbers of devices from the steps of a run on some devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float64

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.extrapolated.reference import device_counts, single_device_gumbel
from evenpack.studies.imbalance.measured.step_log import Cut, StepLog
from evenpack.studies.statistics.fits import ROUNDS, FitReport, FittedLaws, fit_laws, interval
from evenpack.studies.statistics.laws import Gumbel, Law, expected_minima, minimum_weights
from evenpack.studies.statistics.paired import Interval

Method = Literal["gumbel", "normal", "generalised_extreme_value", "reference", "empirical"]

_STEPS_IN_TAIL = 20
"""The minimum of k steps is taken from the steps themselves if this many times k were logged."""


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

    path: Path
    format: str
    steps_read: int
    steps_used: int
    cuts: tuple[Cut, ...]
    log_devices: int
    padded_baseline: float
    """Sequences/s with padding, on `log_devices` devices of the same system."""
    fits: FitReport
    """Fits to the speed-up of each step used."""
    reference_single: Gumbel | None
    """Gumbel of one device, by the published inference; None if no Gumbel could be fitted."""
    rows: tuple[ForecastRow, ...]
    warnings: tuple[str, ...]
    """Warnings of reading, fitting and extrapolating."""


def forecast_from_log(
    log: StepLog,
    *,
    log_devices: int,
    padded_baseline: float | None,
    counts: Sequence[int],
    rounds: int = ROUNDS,
    seed: int = 0,
) -> LogForecast:
    """Forecasts the speed-up over padding for each of `counts`, if steps wait for the slowest of independent devices.

    Raises: ConfigError without a padded baseline above 0, for counts that are not positive integers, or if the log is
    of another number of devices; FitError if no law can be fitted.
    """
    if padded_baseline is None or not (math.isfinite(padded_baseline) and padded_baseline > 0):
        raise ConfigError(
            "a speed-up needs the padded rate of the same system: give sequences/s above 0 over all "
            f"{log_devices} devices as the padded baseline, got {padded_baseline}"
        )
    (log_devices,), checked = device_counts([log_devices]), device_counts(counts)
    if log.devices not in (None, log_devices):
        raise ConfigError(
            f"{log.path} is of a run with {log.devices} ranks, and --log-devices is {log_devices}: set "
            f"--log-devices {log.devices}"
        )
    speed_ups = log.rates / padded_baseline
    fitted = fit_laws(speed_ups, rounds=rounds, seed=seed)
    powers = np.array(checked) / log_devices
    columns = _by_laws(fitted, powers) | _by_reference(fitted, checked, log_devices)
    empirical = _by_steps(speed_ups, fitted.samples, powers)
    best = fitted.report.best.name
    rows = tuple(
        _row(devices, columns[best][index], [column[index] for column in columns.values()], empirical[index])
        for index, devices in enumerate(checked)
    )
    gumbel = _gumbel(fitted)
    return LogForecast(
        path=log.path,
        format=log.format,
        steps_read=log.steps_read,
        steps_used=len(speed_ups),
        cuts=log.cuts,
        log_devices=log_devices,
        padded_baseline=padded_baseline,
        fits=fitted.report,
        reference_single=None if gumbel is None else single_device_gumbel(gumbel, log_devices),
        rows=rows,
        warnings=(*log.warnings, *fitted.report.warnings, *_warnings(rows, log_devices)),
    )


def _row(devices: int, best: Estimate, by_laws: list[Estimate], by_steps: tuple[Estimate, ...]) -> ForecastRow:
    estimates = (*by_laws, *by_steps)
    return ForecastRow(
        devices=devices,
        best=best,
        estimates=estimates,
        extrapolated=not by_steps,
        lowest=min(_low(estimate) for estimate in estimates),
        highest=max(_high(estimate) for estimate in estimates),
    )


def _by_laws(fitted: FittedLaws, powers: Float64[np.ndarray, " counts"]) -> dict[Method, list[Estimate]]:
    """Returns estimates by the cluster's law itself: no assumption on one device's, exact at the log's own count."""
    columns: dict[Method, list[Estimate]] = {}
    for fit in fitted.report.fits:
        columns[fit.name] = _estimates(fit.name, fit.law, fitted.resampled[fit.name], powers)
    return columns


def _by_reference(fitted: FittedLaws, counts: Sequence[int], log_devices: int) -> dict[Method, list[Estimate]]:
    gumbel = _gumbel(fitted)
    if gumbel is None:
        return {}
    singles = [single_device_gumbel(law, log_devices) for law in fitted.resampled["gumbel"] if isinstance(law, Gumbel)]
    single = single_device_gumbel(gumbel, log_devices)
    return {"reference": _estimates("reference", single, singles, np.array(counts, dtype=np.float64))}


def _gumbel(fitted: FittedLaws) -> Gumbel | None:
    return next((fit.law for fit in fitted.report.fits if isinstance(fit.law, Gumbel)), None)


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


def _warnings(rows: tuple[ForecastRow, ...], log_devices: int) -> list[str]:
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
    """Returns whether the best law's interval and that of the steps themselves, if there is one, overlap."""
    steps = [estimate for estimate in row.estimates if estimate.method == "empirical"]
    return all(_low(row.best) <= _high(estimate) and _low(estimate) <= _high(row.best) for estimate in steps)


def _low(estimate: Estimate) -> float:
    return estimate.expected if estimate.interval is None else estimate.interval.low


def _high(estimate: Estimate) -> float:
    return estimate.expected if estimate.interval is None else estimate.interval.high
