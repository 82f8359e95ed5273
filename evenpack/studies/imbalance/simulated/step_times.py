"""Statistics of a scheme's steps: rates with intervals, waiting, efficiency."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from evenpack.studies.imbalance.simulated.cluster import BASELINE, Scheme
from evenpack.studies.imbalance.simulated.drawing import ItemKinds

STEPS_WITHIN = (5.0, 95.0)
"""Percentiles between which single steps are shown."""

_SCALE = np.array([1e3, 1e6])
"""Scale that brings tokens and squared lengths to one order of magnitude, for the regression."""


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
    """Sequences/s divided by those of padding by arrival on as many devices, in the long run (a ratio of means)."""
    speed_up_low: float
    """Start of its 95 % interval over steps: by the delta method, paired by step."""
    speed_up_high: float
    step_low: float
    """5 % of single steps are slower than this speed-up."""
    step_high: float
    """5 % of single steps are faster."""
    sequences_per_second: float
    slowest_over_mean: float
    """Seconds of the slowest device over those of the mean one, mean over steps."""
    worst_slowest_over_mean: float
    """The same in the most uneven step."""
    wait_share: float
    """Fraction of all devices' time spent waiting for the slowest."""
    efficiency: float
    """Sequences/s per device, divided by those of a single device."""

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
    """Returns the speed-up of each step: its rate over that of padding by arrival in the long run."""
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
