"""Distributions fitted to measured speed-ups, with their goodness of fit and confidence intervals."""

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy import stats

from evenpack.errors import FitError
from evenpack.studies.statistics.laws import GeneralisedExtremeValue, Gumbel, Normal
from evenpack.studies.statistics.paired import Interval

LawName = Literal["gumbel", "normal", "generalised_extreme_value"]
AnyLaw = Gumbel | Normal | GeneralisedExtremeValue
Fitter = Callable[[Float64[np.ndarray, " values"]], AnyLaw]

FITTERS: dict[LawName, Fitter] = {
    "gumbel": Gumbel.fit,
    "normal": Normal.fit,
    "generalised_extreme_value": GeneralisedExtremeValue.fit,
}

ROUNDS = 200
"""Rounds of either bootstrap."""
CONFIDENCE = 0.95
ACCEPTABLE_P_VALUE = 0.05
_FAILED_SHARE = 0.1
"""Fraction of a bootstrap's fits that may fail; above it, no result is given."""


@dataclass(frozen=True, kw_only=True)
class DistributionFit:
    """One law and its fit."""

    name: LawName
    law: AnyLaw
    intervals: dict[str, Interval]
    """Interval of each parameter; empty if more than a tenth of the bootstrap's fits failed."""
    log_likelihood: float
    aic: float
    """Akaike's criterion 2 parameters - 2 log-likelihood: the lowest wins."""
    ks_distance: float
    """Largest difference between the fitted and the empirical distribution function."""
    ks_p_value: float | None
    """Fraction of samples drawn from the fitted law, and fitted again, with as large a difference; None if too many
    failed."""

    @property
    def is_acceptable(self) -> bool:
        return self.ks_p_value is not None and self.ks_p_value >= ACCEPTABLE_P_VALUE


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """The fits of all laws."""

    values: int
    mean: float
    deviation: float
    autocorrelation: float
    """Autocorrelation of neighbouring steps."""
    block_length: int
    """Steps that the bootstrap draws together."""
    fits: tuple[DistributionFit, ...]
    """Fits of the laws that converged, the lowest AIC first."""
    warnings: tuple[str, ...]

    @property
    def best(self) -> DistributionFit:
        return self.fits[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedLaws:
    """The report, and the data for a forecast's intervals."""

    report: FitReport
    samples: Float64[np.ndarray, "rounds values"]
    """Samples of the bootstrap."""
    resampled: dict[LawName, tuple[AnyLaw, ...]]
    """For each law in the report, the fits of `samples` that converged; empty if too few did."""


def fit_laws(values: Float64[np.ndarray, " values"], *, rounds: int = ROUNDS) -> FittedLaws:
    """Fits a Gumbel, a normal law and a generalised extreme value law, by maximum likelihood.

    Raises: FitError for values that are not finite, all equal or fewer than 3, or if no fit converges.
    """
    not_finite = np.count_nonzero(~np.isfinite(values))
    if len(values) < 3 or not_finite or np.ptp(values) == 0:
        got = f"{len(values)}"
        if not_finite:
            got += f", {not_finite} of them not finite"
        elif len(values) and np.ptp(values) == 0:
            got += f", all {values[0]:.6g}"
        raise FitError(f"a law needs 3 or more finite values that differ, got {got}: check the log's rates")
    samples = resampled(values, rounds=rounds, seed=0)
    fitted, warnings = _fit_each(values)
    laws = {name: _converged(FITTERS[name], samples) for name in fitted}
    fits = [_assess(name, law, values, laws[name], rounds=rounds) for name, law in fitted.items()]
    fits.sort(key=lambda fit: fit.aic)
    report = FitReport(
        values=len(values),
        mean=float(values.mean()),
        deviation=float(values.std(ddof=1)),
        autocorrelation=autocorrelation(values),
        block_length=block_length(values),
        fits=tuple(fits),
        warnings=(*warnings, *_warnings(fits, block_length(values))),
    )
    return FittedLaws(report=report, samples=samples, resampled=laws)


def _fit_each(values: Float64[np.ndarray, " values"]) -> tuple[dict[LawName, AnyLaw], list[str]]:
    """Returns the laws that converge, and warnings for the others."""
    fitted: dict[LawName, AnyLaw] = {}
    warnings = []
    for name, fitter in FITTERS.items():
        try:
            fitted[name] = fitter(values)
        except FitError as error:
            warnings.append(f"{name}: {error}")
    if not fitted:
        raise FitError("no law could be fitted: " + "; ".join(warnings))
    return fitted, warnings


def resampled(
    values: Float64[np.ndarray, " values"], *, rounds: int, seed: int
) -> Float64[np.ndarray, "rounds values"]:
    """Returns bootstrap samples of blocks of neighbouring steps, circularly."""
    random = np.random.default_rng([seed, 1])
    length = block_length(values)
    blocks = -(-len(values) // length)
    starts = random.integers(len(values), size=(rounds, blocks, 1))
    steps = (starts + np.arange(length)).reshape(rounds, -1)[:, : len(values)]
    drawn: Float64[np.ndarray, "rounds values"] = values[steps % len(values)]
    return drawn


def autocorrelation(values: Float64[np.ndarray, " values"], *, lag: int = 1) -> float:
    """Returns the autocorrelation of values `lag` apart."""
    centred = values - values.mean()
    return float((centred[lag:] * centred[:-lag]).sum() / (centred**2).sum())


def block_length(values: Float64[np.ndarray, " values"]) -> int:
    """Returns the block length: 1 where neighbours are not correlated; a tenth of all values at most.

    Otherwise it is the greater of Carlstein's rule, made for an autoregressive series, and twice the integrated
    autocorrelation time, 1 + 2 (sum over the lags before the first that is not above 0), which also sees slow drift.
    """
    correlation = abs(autocorrelation(values))
    longest = max(1, len(values) // 10)
    if correlation < 2.0 / math.sqrt(len(values)):
        return 1
    carlstein: float = (2.0 * correlation / (1.0 - correlation**2)) ** (2 / 3) * len(values) ** (1 / 3)
    by_lag = (autocorrelation(values, lag=lag) for lag in range(1, longest + 1))
    time = 1.0 + 2.0 * sum(itertools.takewhile(lambda share: share > 0, by_lag))
    return min(math.ceil(max(carlstein, 2.0 * time)), longest)


def interval(numbers: Float64[np.ndarray, " rounds"]) -> Interval:
    """Returns the 2.5th to the 97.5th percentile of a bootstrap, which is slightly short as an interval of 95 %.

    Over 600 synthetic series each, it holds the true mean of 50, 200 and 1,000 independent steps in 92, 93 and 94 % of
    them, and of steps whose neighbours have a correlation of 0.5 in 84, 89 and 93 %: blocks are few in a short log.
    """
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(numbers, tails, method="nearest").tolist()  # never between two infinities
    return Interval(low=low, high=high)


def _converged(fitter: Fitter, samples: Float64[np.ndarray, "rounds values"]) -> tuple[AnyLaw, ...]:
    """Returns the fits that converge; none if more than a tenth do not."""
    laws = []
    for sample in samples:
        with suppress(FitError):
            laws.append(fitter(sample))
    return tuple(laws) if len(laws) >= (1 - _FAILED_SHARE) * len(samples) else ()


def _assess(
    name: LawName,
    law: AnyLaw,
    values: Float64[np.ndarray, " values"],
    resampled_laws: tuple[AnyLaw, ...],
    *,
    rounds: int,
) -> DistributionFit:
    distance, log_likelihood = ks_distance(law, values), float(law.frozen.logpdf(values).sum())
    variates = np.random.default_rng([0, 2]).standard_exponential((rounds, len(values)))
    drawn = law.at_hazard(variates)
    null = [ks_distance(again, sample) for sample in drawn for again in _converged(FITTERS[name], sample[None])]
    return DistributionFit(
        name=name,
        law=law,
        intervals={
            parameter: interval(np.array([vars(other)[parameter] for other in resampled_laws]))
            for parameter in vars(law)
            if resampled_laws
        },
        log_likelihood=log_likelihood,
        aic=2.0 * len(vars(law)) - 2.0 * log_likelihood,
        ks_distance=distance,
        ks_p_value=(1 + sum(other >= distance for other in null)) / (1 + len(null))
        if len(null) >= (1 - _FAILED_SHARE) * rounds
        else None,
    )


def _warnings(fits: list[DistributionFit], block: int) -> list[str]:
    warnings = []
    if not any(fit.is_acceptable for fit in fits):
        closest = min(fits, key=lambda fit: fit.ks_distance)
        warnings.append(
            f"no law fits: every p-value is below {ACCEPTABLE_P_VALUE}; the closest, {closest.name}, is off by up to "
            f"{100 * closest.ks_distance:.2g} % of the steps, so its tail is unreliable"
        )
    for fit in fits:
        if not fit.intervals or fit.ks_p_value is None:
            warnings.append(f"{fit.name}: too many fits of the bootstrap did not converge to give all of its figures")
    if block > 1:
        warnings.append(
            f"neighbouring steps are correlated: intervals come from blocks of {block} steps, but p-values take steps "
            "as independent and are too low"
        )
    return warnings


def ks_distance(law: AnyLaw, values: Float64[np.ndarray, " values"]) -> float:
    """Returns Kolmogorov and Smirnov's distance."""
    return float(stats.ks_1samp(values, law.frozen.cdf, method="asymp").statistic)
