"""The statistics of a scheme's steps: rates with intervals, waiting, efficiency, crossings with packs, histograms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from evenpack.studies.imbalance.cluster import BALANCED_PACKS, BASELINE, DENSE_PACKS, SCHEMES, ItemKinds, Scheme
from evenpack.studies.statistics.fits import ks_distance
from evenpack.studies.statistics.laws import Gumbel

STEPS_WITHIN = (5.0, 95.0)
"""Percentiles between which single steps are shown."""

_SCALE = np.array([1e3, 1e6])
"""Scale that brings tokens and squared lengths to one order of magnitude, for the regression."""
Verdict = Literal["ahead everywhere", "behind everywhere", "falls behind", "gets ahead", "undecided"]
"""The verdict over the simulated counts. Undecided: at each of them the difference is below the 95 % interval."""
_MOST_BARS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """The steps of one scheme on a number of devices, in seconds."""

    step: Float64[np.ndarray, " steps"]
    """Seconds from one update to the next: until the slowest device has finished, and the all-reduce."""
    slowest: Float64[np.ndarray, " steps"]
    """Computing seconds of the slowest device."""
    mean: Float64[np.ndarray, " steps"]
    """Computing seconds of the mean device."""
    excess_work: Float64[np.ndarray, "steps 2"]
    """Tokens and squared lengths of the mean drawn item, minus their expectation."""
    sequences: float
    """Expected sequences of a step."""
    slopes: Float64[np.ndarray, "2"] | None = None
    """Seconds of a step by the excess work of its mean item, if they are known; None: by regression over the steps."""

    @classmethod
    def of_columns(cls, columns: Float64[np.ndarray, "steps 5"], kinds: ItemKinds, *, items: int) -> "StepTimes":
        """Makes the times from the columns of `Cluster.steps`, of `items` per step that are drawn from `kinds`."""
        step, slowest, mean = np.ascontiguousarray(columns[:, :3].T)
        return cls(
            step=step,
            slowest=slowest,
            mean=mean,
            excess_work=columns[:, 3:] - kinds.probabilities @ kinds.work,
            sequences=items * kinds.mean_sequences,
        )

    @cached_property
    def as_expected(self) -> Float64[np.ndarray, " steps"]:
        """Returns the seconds of each step, corrected for having drawn more or less work than expected.

        The method is control variates: the expected work is known exactly, so the part of the seconds that depends on
        it by linear regression needs no estimate, which reduces the variance of the mean.
        """
        slopes = seconds_by_work(self.excess_work, self.step) if self.slopes is None else self.slopes
        corrected: Float64[np.ndarray, " steps"] = self.step - self.excess_work @ slopes
        return corrected

    @property
    def rate(self) -> float:
        """Returns the expected sequences of a step over its expected seconds: the sequences/s of a long run."""
        return self.sequences / float(self.as_expected.mean())


def seconds_by_work(work: Float64[np.ndarray, "n 2"], seconds: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, "2"]:
    """Returns the slopes of the linear regression of seconds on tokens and squared lengths."""
    centred = work - work.mean(axis=0)
    slopes, *_ = np.linalg.lstsq(centred / _SCALE, seconds - seconds.mean(), rcond=1e-9)
    return np.asarray(slopes / _SCALE)


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """ln(rate / other rate) of some steps, with its standard error."""

    value: float
    error: float
    steps: int

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval, by Student's law."""
        return float(stdtrit(self.steps - 1, 0.975)) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the 95 % interval, as ratios."""
        return float(np.exp(self.value - self.reach)), float(np.exp(self.value + self.reach))


def log_ratio(times: StepTimes, other: StepTimes) -> LogRatio:
    """Returns the log ratio of two schemes on as many devices, paired by step, because equal draws are correlated."""
    # To first order ln of a mean errs by the mean of (value / mean - 1): the delta method for a ratio of means.
    errors = other.as_expected / other.as_expected.mean() - times.as_expected / times.as_expected.mean()
    error = float(errors.std(ddof=1)) / len(errors) ** 0.5
    return LogRatio(value=float(np.log(times.rate / other.rate)), error=error, steps=len(errors))


@dataclass(frozen=True, kw_only=True)
class SchemeRow:
    """The results of a scheme on a number of devices."""

    layout: str
    policy: str
    dense: bool
    devices: int
    steps: int
    speed_up: float
    """Speed-up in sequences/s over padding by arrival on as many devices, in the long run (a ratio of means)."""
    speed_up_low: float
    """Start of its 95 % interval over steps: by the delta method, paired by step."""
    speed_up_high: float
    step_low: float
    """5 % of single steps are slower than this speed-up."""
    step_high: float
    """5 % of single steps are faster."""
    sequences_per_second: float
    slowest_over_mean: float
    """Seconds of the slowest device over the mean device's, mean over steps."""
    worst_slowest_over_mean: float
    """Seconds of the slowest device over the mean device's, in the most uneven step."""
    wait_share: float
    """Fraction of all devices' time spent waiting for the slowest."""
    efficiency: float
    """Sequences/s per device, divided by the sequences/s of a single device."""

    def is_of(self, scheme: Scheme) -> bool:
        """Whether these are steps of a scheme."""
        return (self.layout, self.policy, self.dense) == astuple(scheme)


def summarise(scheme: Scheme, times: Mapping[tuple[Scheme, int], StepTimes]) -> list[SchemeRow]:
    """Returns a row for each number of devices, ascending; `times` has one device and the baseline too."""
    alone = times[scheme, 1].rate
    counts = sorted(devices for one, devices in times if one == scheme)
    return [_row(scheme, devices, times[scheme, devices], times[BASELINE, devices], alone) for devices in counts]


def step_speed_ups(
    scheme: Scheme, times: Mapping[tuple[Scheme, int], StepTimes], devices: int
) -> Float64[np.ndarray, " steps"]:
    """Returns the speed-up of each step: its rate over the rate of padding by arrival in the long run."""
    own = times[scheme, devices]
    speed_ups: Float64[np.ndarray, " steps"] = own.sequences / own.step / times[BASELINE, devices].rate
    return speed_ups


def _row(scheme: Scheme, devices: int, times: StepTimes, baseline: StepTimes, alone: float) -> SchemeRow:
    low, high = log_ratio(times, baseline).interval
    single = np.percentile(times.sequences / times.step, STEPS_WITHIN) / baseline.rate
    uneven = times.slowest / times.mean
    return SchemeRow(
        layout=scheme.layout,
        policy=scheme.policy,
        dense=scheme.dense,
        devices=devices,
        steps=len(times.step),
        speed_up=times.rate / baseline.rate,
        speed_up_low=low,
        speed_up_high=high,
        step_low=float(single[0]),
        step_high=float(single[1]),
        sequences_per_second=times.rate,
        slowest_over_mean=float(uneven.mean()),
        worst_slowest_over_mean=float(uneven.max()),
        wait_share=max(0.0, float((times.slowest - times.mean).sum() / times.step.sum())),  # not -1e-17
        efficiency=times.rate / (devices * alone),
    )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A scheme compared with a way to pack."""

    layout: str
    policy: str
    against: str
    """`Scheme.label` of the packs."""
    verdict: Verdict
    last_before: int | None
    """Largest simulated number of devices before the change at which the difference exceeds its 95 % interval; None if
    the two do not cross. What happens between simulated counts is not interpolated."""
    first_after: int | None
    """Smallest simulated number of devices after the change at which it does."""


def find_crossings(times: Mapping[tuple[Scheme, int], StepTimes]) -> tuple[Crossing, ...]:
    """Compares every scheme without packs with packs assigned by cost, and with packs with dense attention."""
    counts = sorted({devices for _, devices in times})
    return tuple(
        _crossing(scheme, packs, counts, times)
        for packs in (BALANCED_PACKS, DENSE_PACKS)
        for scheme in SCHEMES
        if scheme.batching != "packs" and scheme != BASELINE
    )


def _crossing(
    scheme: Scheme, packs: Scheme, counts: Sequence[int], times: Mapping[tuple[Scheme, int], StepTimes]
) -> Crossing:
    ratios = [log_ratio(times[scheme, devices], times[packs, devices]) for devices in counts]
    signs = [0 if abs(ratio.value) <= ratio.reach else int(np.sign(ratio.value)) for ratio in ratios]
    decided = [(sign, devices) for sign, devices in zip(signs, counts, strict=True) if sign]
    change = next((index for index, (sign, _) in enumerate(decided) if sign != decided[0][0]), None)
    return Crossing(
        layout=scheme.layout,
        policy=scheme.policy,
        against=packs.label,
        verdict=_verdict([sign for sign, _ in decided]),
        last_before=None if change is None else decided[change - 1][1],
        first_after=None if change is None else decided[change][1],
    )


def _verdict(decided: Sequence[int]) -> Verdict:
    if not decided:
        return "undecided"
    if len(set(decided)) == 1:
        return "ahead everywhere" if decided[0] > 0 else "behind everywhere"
    return "falls behind" if decided[0] > 0 else "gets ahead"


@dataclass(frozen=True, kw_only=True)
class StepHistogram:
    """Speed-ups of single steps on one number of devices."""

    devices: int
    steps: int
    speed_up: float
    """Speed-up of a long run: the ratio of the mean rates, as in the tables."""
    mean: float
    """Mean of the steps' own speed-ups, which is above `speed_up` where steps scatter."""
    deviation: float
    edges: tuple[float, ...]
    """Edges of the bars, of equal width."""
    counts: tuple[int, ...]
    """Steps in each bar; one fewer than there are edges."""
    fitted: Gumbel | None
    """Gumbel fitted to these steps by maximum likelihood; None if they are all equally fast."""
    fitted_distance: float | None
    """Largest difference between its distribution function and the steps' (Kolmogorov and Smirnov's)."""
    beside: Gumbel | None
    """The law with which the steps are compared, if there is one."""
    beside_distance: float | None


def step_histogram(
    speed_ups: Float64[np.ndarray, " steps"], *, speed_up: float, devices: int, beside: Gumbel | None = None
) -> StepHistogram:
    """Makes a histogram of finite speed-ups, one for each step; `beside` is the law to compare them with.

    `speed_up` is the speed-up of a long run of such steps.
    """
    counts, edges = np.histogram(speed_ups, bins=min(_MOST_BARS, math.ceil(len(speed_ups) ** 0.5)))
    fitted = Gumbel.fit(speed_ups) if np.ptp(speed_ups) > 0 else None
    return StepHistogram(
        devices=devices,
        steps=len(speed_ups),
        speed_up=speed_up,
        mean=float(speed_ups.mean()),
        deviation=float(speed_ups.std(ddof=1)),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        fitted=fitted,
        fitted_distance=None if fitted is None else ks_distance(fitted, speed_ups),
        beside=beside,
        beside_distance=None if beside is None else ks_distance(beside, speed_ups),
    )
