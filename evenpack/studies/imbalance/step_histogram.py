"""How the speed-up over padding varies from step to step: a histogram beside laws (PackedBERT, section E, figure 6)."""

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
    mean: float
    deviation: float
    edges: tuple[float, ...]
    """Of the bars, of equal width."""
    counts: tuple[int, ...]
    """Steps in each bar; one less than there are edges."""
    fitted: Gumbel | None
    """By maximum likelihood to these steps; None: they are all equally fast."""
    fitted_distance: float | None
    """Largest gap between its distribution function and that of the steps (Kolmogorov and Smirnov's)."""
    beside: Gumbel | None
    """The law that the steps are held against, if there is one."""
    beside_distance: float | None


def step_histogram(
    speed_ups: Float64[np.ndarray, " steps"], *, devices: int, beside: Gumbel | None = None
) -> StepHistogram:
    """Of finite speed-ups, one for each step; `beside` is the law that they are held against."""
    counts, edges = np.histogram(speed_ups, bins=min(_MOST_BARS, math.ceil(len(speed_ups) ** 0.5)))
    fitted = Gumbel.fit(speed_ups) if np.ptp(speed_ups) > 0 else None
    return StepHistogram(
        devices=devices,
        steps=len(speed_ups),
        mean=float(speed_ups.mean()),
        deviation=float(speed_ups.std(ddof=1)),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        fitted=fitted,
        fitted_distance=None if fitted is None else ks_distance(fitted, speed_ups),
        beside=beside,
        beside_distance=None if beside is None else ks_distance(beside, speed_ups),
    )
