"""The speed-up over padding from step to step: a histogram with laws (PackedBERT, section E, figure 6)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.studies.statistics.fits import ks_distance
from evenpack.studies.statistics.laws import Gumbel

_MOST_BARS = 60


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
    """Largest difference between its distribution function and that of the steps (Kolmogorov and Smirnov's)."""
    beside: Gumbel | None
    """The law with which the steps are compared, if there is one."""
    beside_distance: float | None


def step_histogram(
    speed_ups: Float64[np.ndarray, " steps"], *, speed_up: float, devices: int, beside: Gumbel | None = None
) -> StepHistogram:
    """Makes a histogram of finite speed-ups, one for each step; `beside` is the law to compare them with.

    `speed_up` is that of a long run of such steps.
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
