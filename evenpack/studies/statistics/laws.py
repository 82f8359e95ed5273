"""The right-skewed Gumbel of a speed-up, and the expected minimum of several draws, for the slowest rank.

Density, distribution function and fit are SciPy's. Minima are computed from the cumulative hazard H(s) = -ln(1 - F(s)),
whose inverse SciPy lacks. The minimum of n draws has n * H(s), for any n > 0, so no power of a survival function is
ever taken and nothing underflows at a million devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy import stats

from evenpack.errors import ConfigError

_STEP = 1 / 8
"""Step of the trapezoidal rule over ln H, in which the integrand is analytic: its error is below 1e-16."""
_NODES = np.exp(np.arange(-45.0, math.log(700.0), _STEP))
_WEIGHTS = _STEP * _NODES * np.exp(-_NODES)
_LARGE_HAZARD = 36.0
"""From here on -ln(-ln F) and H are equal in double precision."""


@dataclass(frozen=True, kw_only=True)
class Gumbel:
    """Right-skewed Gumbel, F(s) = exp(-exp(-(s - location) / scale))."""

    location: float
    scale: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.location) and math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(
                f"a Gumbel needs a finite location and a scale above 0, got {self.location} and {self.scale}"
            )

    @classmethod
    def fit(cls, values: Float64[np.ndarray, " values"]) -> "Gumbel":
        """Fits by maximum likelihood."""
        location, scale = stats.gumbel_r.fit(values)
        return cls(location=float(location), scale=float(scale))

    @property
    def frozen(self) -> Any:
        """Returns SciPy's distribution."""
        return stats.gumbel_r(self.location, self.scale)

    @property
    def mean(self) -> float:
        return self.location + float(np.euler_gamma) * self.scale


def expected_minima(law: Gumbel, devices: Sequence[float | int]) -> Float64[np.ndarray, " counts"]:
    """Returns the expected minimum of each number of independent draws from `law`.

    E[min] = integral of s(t / devices) exp(-t) dt over t > 0, where s is the speed-up at a hazard. Fractions are
    allowed: if `law` describes a cluster of n, then m / n draws represent m devices.
    """
    hazards = _NODES / np.asarray(devices, dtype=np.float64)[:, None]
    return (law.location + law.scale * _gumbel_variate(hazards)) @ _WEIGHTS


def ks_distance(frozen: Any, values: Float64[np.ndarray, " values"]) -> float:
    """Returns Kolmogorov and Smirnov's distance to a distribution of SciPy's."""
    return float(stats.ks_1samp(values, frozen.cdf, method="asymp").statistic)


def _gumbel_variate(hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns -ln(-ln F) at a hazard, exact in both tails."""
    log_cdf = _log_complement(np.minimum(hazard, _LARGE_HAZARD))
    return np.where(hazard < _LARGE_HAZARD, -np.log(-log_cdf), hazard)


def _log_complement(hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns ln(1 - exp(-hazard)), which is ln F, exact in both tails."""
    low = np.log(-np.expm1(-np.minimum(hazard, 1.0)))
    high = np.log1p(-np.exp(-np.maximum(hazard, 0.5)))
    return np.where(hazard < math.log(2.0), low, high)
