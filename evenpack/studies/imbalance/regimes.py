"""Regimes of a log: stretches of steps with a level of their own, and what they say about other numbers of devices.

Where each rank reads one shard of the data after another, all of them change shards in the same step, and the rate
keeps a level of its own until the next change. Steps of one regime are nearly independent, and steps of two regimes are
not draws of one law: a run of ten thousand steps may be worth ten independent values. Intervals come from resampled
runs, and resampled regimes within them, never from resampled steps, but for a single regime: then from blocks of its
steps, because nothing is known of other levels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy import special, stats

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.measurement import DIP_SPREADS, median_and_spread, steady_start
from evenpack.studies.statistics.laws import Gumbel, ks_distance
from evenpack.studies.statistics.paired import Bounded, Interval
from evenpack.studies.statistics.resampling import ROUNDS, autocorrelation, interval, resampled

LEAST_REGIME_STEPS = 200
"""Steps of a regime, after those that are none were left out."""
_BLOCK_STEPS = 25
_MOST_BLOCKS = 1000
_PENALTY = 8.0
"""What a change must explain, in variances of a block's median times ln(blocks). BIC asks for 2; in the published logs
slow drift within a shard passes 3, and at 8 no found change of 8 A100 is away from a change of shards."""
_NEAR_STEPS = 60
"""Distance to a multiple of the regime's length within which a found change fits it."""
_FITTING_SHARE = 0.75
_GRID_POINTS = 4001
_STEPS_IN_TAIL = 20
"""One regime reaches as far as this many of its steps are as slow as the slowest of so many."""
Method = Literal["normal", "gumbel", "empirical", "without_levels"]

Rates = Float64[np.ndarray, " steps"]
Survival = Float64[np.ndarray, "regimes points"]
"""Probability of a rate above each point, for each regime."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Steps of one run at one level; rates in sequences/s over all devices."""

    run: int
    first_step: int
    """Step of the log, counted from 0."""
    steps: int
    """Steps that are used."""
    mean: float
    deviation: float
    autocorrelation: float
    """Autocorrelation of neighbouring steps."""
    normal_distance: float
    """Kolmogorov and Smirnov's distance to the normal law of this mean and deviation."""
    gumbel: Gumbel
    """Right-skewed Gumbel of the rate by maximum likelihood, the published law."""
    gumbel_distance: float
    gumbel_excess_aic: float
    """AIC of the Gumbel less that of the normal law: above 0 the normal law fits better."""
    hiccups: int
    """Steps left out because they are 5 spreads below the median: a pause, an evaluation, a checkpoint."""
    hiccup_seconds: float
    """Fraction of the regime's time that they take beyond steps of the median rate."""
    short_steps: int
    """Steps left out because they are 5 spreads above the median: a shard's last batch, which has fewer sequences."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected speed-up by one method."""

    method: Method
    """The law within a regime; "empirical": its steps as they were logged; "without_levels": regimes at one level."""
    expected: float
    interval: Interval
    """95 % interval of the regimes, not of the choice of the law."""


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """The expected speed-up at a number of devices."""

    devices: int
    best: Estimate
    """Estimate by the law with the lowest AIC over all regimes."""
    estimates: tuple[Estimate, ...]
    """Estimates by all methods."""
    extrapolated: bool
    """Whether the number needs more shards, or of one regime more steps, than the log shows."""
    lowest: float
    """Lowest value of all estimates and their intervals, but those without levels."""
    highest: float


@dataclass(frozen=True, kw_only=True)
class RegimeForecast:
    """The variance within and between the regimes of a system's runs, and forecasts for more devices."""

    log_devices: int
    runs: int
    regime_steps: int | None
    """Steps of a regime, as given; None: the changes that were found divide the runs."""
    regimes: tuple[Regime, ...]
    law: Literal["normal", "gumbel"]
    """The law within a regime with the lower AIC over all regimes."""
    within: Bounded
    """Standard deviation of steps around their regime's level, over the mean rate."""
    between: Bounded
    """Standard deviation of the levels of all runs' regimes, over the mean rate; 0 for one, of which none is known."""
    share_between: Bounded
    """Share of the variance that is between regimes, those of all runs pooled."""
    share_between_in_run: Bounded | None
    """The same within single runs, without the differences between them; None if no run has two regimes."""
    effective_values: Bounded
    """Independent values with as good a mean as that of a run."""
    run_deviation: float | None
    """Standard deviation of the means of runs, over the mean; None for a single run."""
    rows: tuple[ForecastRow, ...]
    """Rates per device relative to `log_devices`, or speed-ups where a baseline was given."""
    warnings: tuple[str, ...]


def change_points(rates: Rates) -> tuple[int, ...]:
    """Returns the steps at which the level of the rate changes, by least squares on medians of blocks of steps.

    The partition is optimal for a penalty on each change (dynamic programming over all partitions). The place of a
    change is then the step that divides its neighbourhood best.
    """
    size = max(_BLOCK_STEPS, len(rates) // _MOST_BLOCKS)
    logarithms, blocks = np.log(rates), len(rates) // size
    least = -(-LEAST_REGIME_STEPS // size)
    if blocks < 2 * least:
        return ()
    medians = np.median(logarithms[: blocks * size].reshape(blocks, size), axis=1)
    noise = median_and_spread(np.diff(medians))[1] ** 2 / 2
    edges = _best_edges(medians, _PENALTY * noise * np.log(blocks), least)
    found = []
    for before, edge, after in zip(edges, edges[1:], edges[2:], strict=False):
        low, high = (np.median(logarithms[a * size : b * size]) for a, b in ((before, edge), (edge, after)))
        first = (edge - 2) * size
        near = logarithms[first : (edge + 2) * size]
        reach = 3 * median_and_spread(near)[1]
        gains = np.clip((near - (low + high) / 2) * np.sign(low - high), -reach, reach)
        found.append(first + int(np.append(0, np.cumsum(gains)).argmax()))
    return tuple(found)


def _best_edges(values: Float64[np.ndarray, " blocks"], penalty: float, least: int) -> list[int]:
    """Returns the edges of the partition with the least squared deviations from means, plus a penalty per change."""
    count = len(values)
    sums, squares = (np.append(0.0, np.cumsum(each)) for each in (values, values**2))
    best, last = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
    best[0] = -penalty
    for end in range(least, count + 1):
        starts = np.arange(end - least + 1)
        loss = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / (end - starts)
        total = best[starts] + loss + penalty
        last[end] = total.argmin()
        best[end] = total[last[end]]
    edges = [count]
    while edges[0]:
        edges.insert(0, int(last[edges[0]]))
    return edges


def fitting_steps(changes: Sequence[int]) -> int | None:
    """Returns the longest regime that three quarters of the changes are multiples of; None if there is none."""
    if len(changes) < 3:
        return None
    for length in range(max(changes) + _NEAR_STEPS, LEAST_REGIME_STEPS, -1):
        if _fits(changes, length).mean() >= _FITTING_SHARE:
            near = np.array(changes)[_fits(changes, length)]
            multiples = np.round(near / length)
            return round(float(near @ multiples / (multiples @ multiples)))
    return None


def _fits(changes: Sequence[int], length: int) -> np.ndarray:
    multiples = np.maximum(1, np.round(np.array(changes) / length))
    return np.abs(np.array(changes) - multiples * length) <= min(_NEAR_STEPS, length / 10)


@dataclass(frozen=True, kw_only=True, eq=False)
class Division:
    """The regimes of all runs of a system."""

    regimes: tuple[Regime, ...]
    rates: tuple[Rates, ...]
    """The steps of each regime that are used."""
    regime_steps: int | None = None
    """Steps of a regime, as given; None: the changes that were found divide the runs."""


def divide(runs: Sequence[Rates], regime_steps: int | None = None) -> Division:
    """Divides runs into regimes.

    Args:
        runs: the rate of every step of each run, in order.
        regime_steps: steps of a regime; None: they end where the level is found to change.

    Raises: ConfigError if most changes are not near a multiple of `regime_steps`.
    """
    starts = [steady_start(rates) for rates in runs]
    changes = [
        [start + change for change in change_points(rates[start:])] for start, rates in zip(starts, runs, strict=True)
    ]
    every = [change for of_run in changes for change in of_run]
    if regime_steps is not None and len(every) > 1 and _fits(every, regime_steps).mean() < 1 / 2:
        shown = ", ".join(f"{change:,}" for change in sorted(every)[:6])
        fitting = fitting_steps(every)
        remedy = "leave the option out, and the changes divide the runs"
        raise ConfigError(
            f"--regime-steps {regime_steps}: {np.count_nonzero(~_fits(every, regime_steps))} of {len(every)} changes "
            f"of the level are not near a multiple of it (the first are at steps {shown}); "
            + (remedy if fitting is None else f"they fit regimes of about {fitting:,} steps: give that, or {remedy}")
        )
    found = []
    for run, (rates, start, of_run) in enumerate(zip(runs, starts, changes, strict=True)):
        edges = of_run if regime_steps is None else list(range(regime_steps, len(rates), regime_steps))
        for first, last in zip([start, *edges], [*edges, len(rates)], strict=True):
            found += _regime(run, first, rates[first:last])
    return Division(
        regimes=tuple(regime for regime, _ in found),
        rates=tuple(used for _, used in found),
        regime_steps=regime_steps,
    )


def _regime(run: int, first: int, rates: Rates) -> list[tuple[Regime, Float64[np.ndarray, " used"]]]:
    """Returns what is known of a regime, and its steps that are used; nothing if they are too few."""
    if len(rates) < LEAST_REGIME_STEPS:
        return []
    median, spread = median_and_spread(rates)
    is_slow, is_fast = rates < median - DIP_SPREADS * spread, rates > median + DIP_SPREADS * spread
    used = rates[~(is_slow | is_fast)]
    if len(used) < LEAST_REGIME_STEPS or np.ptp(used) == 0:
        return []
    gumbel, mean, deviation = Gumbel.fit(used), float(used.mean()), float(used.std(ddof=1))
    normal = stats.norm(mean, deviation)
    regime = Regime(
        run=run,
        first_step=first,
        steps=len(used),
        mean=mean,
        deviation=deviation,
        autocorrelation=autocorrelation(used),
        normal_distance=ks_distance(normal, used),
        gumbel=gumbel,
        gumbel_distance=ks_distance(gumbel.frozen, used),
        gumbel_excess_aic=2.0 * float((normal.logpdf(used) - gumbel.frozen.logpdf(used)).sum()),
        hiccups=int(is_slow.sum()),
        hiccup_seconds=float((1 / rates[is_slow] - 1 / median).sum() / (1 / rates).sum()),
        short_steps=int(is_fast.sum()),
    )
    return [(regime, used)]


def forecast_from_regimes(
    division: Division, *, log_devices: int, counts: Sequence[int], padded_baseline: float | None = None
) -> RegimeForecast:
    """Splits the variance, and forecasts each of `counts` that is not below the log's devices.

    A cluster of k times the log's devices takes as long as the slowest of k draws, each of a regime and a step of it:
    every rank has a shard of its own there too. The network is ideal.

    Args:
        division: of one regime or more.
        padded_baseline: sequences/s with padding on the log's devices: the forecasts are speed-ups over it.
    """
    regimes = division.regimes
    names = sorted({regime.run for regime in regimes})
    found, weights, of_run = _resampled(division, names)
    split = _split(found.regimes, weights)
    mean, between, within = split
    per_run = len(regimes) / len(names)
    steps = sum(regime.steps for regime in regimes) / len(names)
    law: Literal["normal", "gumbel"] = "normal" if sum(one.gumbel_excess_aic for one in regimes) > 0 else "gumbel"
    in_run = _share_in_run(regimes, names, of_run)
    levels = np.array([np.mean([one.mean for one in regimes if one.run == name]) for name in names])
    reach = log_devices * (len(regimes) if len(regimes) > 1 else regimes[0].steps // _STEPS_IN_TAIL)
    rows = _rows(found, law, weights, log_devices=log_devices, counts=counts, reach=reach, baseline=padded_baseline)
    warnings = []
    if any(count < log_devices for count in counts):
        warnings.append(
            f"below {log_devices} devices nothing is forecast from regimes: what one device's law is, steps of "
            f"{log_devices} do not say"
        )
    if len(regimes) == 1 and any(count > reach for count in counts):
        warnings.append(
            f"beyond {reach:,} devices fewer than {_STEPS_IN_TAIL} logged steps are as slow as the forecast: the law "
            "alone decides"
        )
    elif any(count > reach for count in counts):
        warnings.append(
            f"beyond {reach:,} devices the forecast needs more shards than the {len(regimes)} regimes of {log_devices} "
            "devices show: the law of the levels alone decides there, and no interval contains that"
        )
    return RegimeForecast(
        log_devices=log_devices,
        runs=len(names),
        regime_steps=division.regime_steps,
        regimes=regimes,
        law=law,
        within=_bounded(within**0.5 / mean),
        between=_bounded(between**0.5 / mean),
        share_between=_bounded(between / (between + within)),
        share_between_in_run=None if in_run is None else _bounded(in_run),
        effective_values=_bounded((between + within) / (between / per_run + within / steps)),
        run_deviation=float(levels.std(ddof=1) / levels.mean()) if len(levels) > 1 else None,
        rows=tuple(rows),
        warnings=tuple(warnings),
    )


def _bounded(values: Float64[np.ndarray, " rounds"]) -> Bounded:
    """Returns the first value, with the interval of the others."""
    return Bounded(value=float(values[0]), interval=interval(values[1:]))


def _resampled(division: Division, names: Sequence[int]) -> tuple[Division, np.ndarray, np.ndarray]:
    """Returns regimes, how often each is drawn, and how often each run is: as found, then by rounds of a bootstrap.

    A single regime is drawn from blocks of its steps, as regimes of their own.
    """
    regimes = division.regimes
    if len(regimes) == 1:
        (regime,), (rates,) = regimes, division.rates
        samples = resampled(rates, rounds=ROUNDS, seed=0)
        drawn = [
            replace(regime, mean=float(one.mean()), deviation=float(one.std(ddof=1)), gumbel=Gumbel.fit(one))
            for one in samples
        ]
        found = Division(regimes=(regime, *drawn), rates=(rates, *samples))
        return found, np.eye(1 + ROUNDS), np.ones((1 + ROUNDS, 1))
    random = np.random.default_rng([0, 3])
    members = [np.flatnonzero([regime.run == name for regime in regimes]) for name in names]
    of_run = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=ROUNDS)
    of_regime = np.zeros((ROUNDS, len(regimes)))
    for times, drawn_regimes in zip(of_run, of_regime, strict=True):
        for repeats, own in zip(times.tolist(), members, strict=True):
            drawn_regimes[own] += random.multinomial(repeats * len(own), np.full(len(own), 1 / len(own)))
    first_regime, first_run = np.ones((1, len(regimes))), np.ones((1, len(names)))
    return division, np.concatenate([first_regime, of_regime]), np.concatenate([first_run, of_run])


def _split(regimes: Sequence[Regime], weights: np.ndarray) -> Float64[np.ndarray, "parts rounds"]:
    """Returns the mean, the variance between regimes and the variance within, for each row of weights."""
    means, deviations = (np.array([getattr(one, name) for one in regimes]) for name in ("mean", "deviation"))
    total = weights.sum(axis=1)
    mean = weights @ means / total
    between = (weights @ means**2 / total - mean**2).clip(0.0) * total / np.maximum(total - 1, 1)
    return np.stack([mean, between, weights @ deviations**2 / total])


def _share_in_run(regimes: Sequence[Regime], names: Sequence[int], of_run: np.ndarray) -> np.ndarray | None:
    """Returns the share of the variance that is between the regimes of a run, for each row of weights of runs."""
    squares, free, within, count = np.zeros((4, len(names)))
    for place, name in enumerate(names):
        own = [regime for regime in regimes if regime.run == name]
        means = np.array([regime.mean for regime in own])
        squares[place], free[place] = ((means - means.mean()) ** 2).sum(), len(own) - 1
        within[place], count[place] = sum(regime.deviation**2 for regime in own), len(own)
    if not free.any():
        return None
    between = of_run @ squares / np.maximum(of_run @ free, 1)
    return between / (between + of_run @ within / (of_run @ count))


def _rows(
    division: Division,
    law: str,
    weights: np.ndarray,
    *,
    log_devices: int,
    counts: Sequence[int],
    reach: int,
    baseline: float | None,
) -> list[ForecastRow]:
    survival, points = _survival(division)
    kept = [count for count in counts if count >= log_devices]
    powers = np.array([1, *kept]) / np.array([1, *[log_devices] * len(kept)])
    found: dict[Method, np.ndarray] = {}
    for method, of_regime in survival.items():
        mixed = weights @ of_regime / weights.sum(axis=1, keepdims=True)
        rates = _slowest_rates(mixed, points, powers)
        found[method] = rates[:, 1:] / (rates[:, :1] if baseline is None else baseline)
    rows = []
    for place, count in enumerate(kept):
        estimates = tuple(
            Estimate(method=method, expected=float(of[0, place]), interval=interval(of[1:, place]))
            for method, of in found.items()
        )
        asked = [one for one in estimates if one.method != "without_levels"]
        rows.append(
            ForecastRow(
                devices=count,
                best=next(one for one in estimates if one.method == law),
                estimates=estimates,
                extrapolated=count > reach,
                lowest=min(one.interval.low for one in asked),
                highest=max(one.interval.high for one in asked),
            )
        )
    return rows


def _survival(division: Division) -> tuple[Mapping[Method, Survival], np.ndarray]:
    """Returns the survival functions of the rate in each regime, by each method, and the rates at which they are.

    normal, gumbel    the law of each regime, at the levels that were found
    empirical         the steps of each regime as they were logged
    without_levels    normal within, all regimes at one level, as if sequences were shuffled over all shards
    """
    regimes = division.regimes
    means, deviations = (np.array([[getattr(one, name)] for one in regimes]) for name in ("mean", "deviation"))
    mean = float(means.mean())
    lowest = max(float((means - 9 * deviations).min()), float(means.min()) / 10)
    points = np.linspace(lowest, float((means + 12 * deviations).max()), _GRID_POINTS)
    location, scale = (np.array([[getattr(one.gumbel, name)] for one in regimes]) for name in ("location", "scale"))
    found: Mapping[Method, Survival] = {
        "normal": special.ndtr((means - points) / deviations),
        "gumbel": -np.expm1(-np.exp((location - points) / scale)),
        "without_levels": special.ndtr((mean - points) / (deviations * mean / means)),
        "empirical": np.array(
            [1 - np.searchsorted(np.sort(own), points, side="right") / len(own) for own in division.rates]
        ),
    }
    return found, points


def _slowest_rates(
    survival: np.ndarray, points: np.ndarray, powers: np.ndarray
) -> Float64[np.ndarray, "rounds powers"]:
    """Returns the rate of a long run whose steps are the slowest of so many draws: 1 / E[1 / minimum].

    E[1 / M] = 1 / lowest - integral of S(u)^k / u² du, since S^k is the survival function of the minimum of k.
    """
    widths = (points[1] - points[0]) / points**2
    widths[[0, -1]] /= 2
    seconds = 1 / points[0] - np.stack([survival**power @ widths for power in powers], axis=1)
    return 1 / seconds
