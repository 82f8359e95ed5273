"""Laws of a random speed-up, and the expected minimum of several draws: all ranks of a step wait for the slowest.

Everything is computed from the cumulative hazard H(s) = -ln(1 - F(s)). The minimum of n draws has n * H(s), for any
n > 0, so no power of a survival function is ever taken and nothing underflows at a million devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from scipy import special

from evenpack.errors import ConfigError

_STEP = 1 / 8
"""Of the trapezoidal rule over ln H, in which the integrand is analytic: its error is below 1e-16."""
_NODES = np.exp(np.arange(-45.0, math.log(700.0), _STEP))
_WEIGHTS = _STEP * _NODES * np.exp(-_NODES)
_LARGE_HAZARD = 36.0
"""From here on -ln(-ln F) and H are equal in double precision."""


@runtime_checkable
class Law(Protocol):
    """A continuous distribution of speed-ups."""

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """The speed-up s at which -ln(1 - F(s)) is `hazard`; of an exponential variate it is a draw."""
        ...

    def has_mean(self, devices: float) -> bool:
        """Whether the minimum of `devices` draws has a finite mean."""
        ...


@dataclass(frozen=True, kw_only=True)
class Gumbel:
    """Right-skewed Gumbel, F(s) = exp(-exp(-(s - location) / scale)); the scale is above 0."""

    location: float
    scale: float

    def __post_init__(self) -> None:
        _check(self.location, self.scale, "Gumbel")

    @property
    def mean(self) -> float:
        return self.location + float(np.euler_gamma) * self.scale

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        return self.location + self.scale * _gumbel_variate(hazard)

    def has_mean(self, devices: float) -> bool:
        return devices > 0


@dataclass(frozen=True, kw_only=True)
class Normal:
    """Normal; the scale is its standard deviation."""

    location: float
    scale: float

    def __post_init__(self) -> None:
        _check(self.location, self.scale, "normal law")

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        low = special.ndtri(-np.expm1(-np.minimum(hazard, 1.0)))
        high = -special.ndtri_exp(-np.maximum(hazard, 0.5))
        variate: Float64[np.ndarray, "*shape"] = np.where(hazard < math.log(2.0), low, high)
        return self.location + self.scale * variate

    def has_mean(self, devices: float) -> bool:
        return devices > 0


@dataclass(frozen=True, kw_only=True)
class GeneralisedExtremeValue:
    """F(s) = exp(-(1 + shape z)^(-1 / shape)) with z = (s - location) / scale; shape 0 is the Gumbel.

    A shape below 0 ends at location - scale / shape, one above 0 has a heavy upper tail. SciPy's `c` is -shape.
    """

    location: float
    scale: float
    shape: float

    def __post_init__(self) -> None:
        _check(self.location, self.scale, "generalised extreme value law")

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        variate = _gumbel_variate(hazard)
        bent: Float64[np.ndarray, "*shape"] = variate * special.exprel(self.shape * variate)
        return self.location + self.scale * bent

    def has_mean(self, devices: float) -> bool:
        return devices > self.shape


def expected_minima(law: Law, devices: Sequence[float | int]) -> Float64[np.ndarray, " counts"]:
    """Expected minimum of each number of independent draws from `law`.

    E[min] = integral of s(t / devices) exp(-t) dt over t > 0, where s is `law.at_hazard`. Fractions are allowed: if
    `law` is that of a cluster of n, then m / n draws stand for m devices. Infinite where the mean does not exist.
    """
    counts = np.asarray(devices, dtype=np.float64)
    if not (np.isfinite(counts).all() and (counts > 0).all()):
        raise ConfigError(f"expected numbers of devices above 0, got {list(devices)}")
    finite = np.array([law.has_mean(count) for count in counts.tolist()], dtype=bool)
    expected = np.full(counts.shape, np.inf)
    expected[finite] = law.at_hazard(_NODES / counts[finite, None]) @ _WEIGHTS
    return expected


def expected_minimum(law: Law, devices: float | int) -> float:
    """`expected_minima` of one count."""
    return float(expected_minima(law, [devices])[0])


def _gumbel_variate(hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """-ln(-ln F) at a hazard, exact in both tails."""
    low = np.log(-np.expm1(-np.minimum(hazard, 1.0)))
    high = np.log1p(-np.exp(-np.clip(hazard, 0.5, _LARGE_HAZARD)))
    log_cdf = np.where(hazard < math.log(2.0), low, high)
    return np.where(hazard < _LARGE_HAZARD, -np.log(-log_cdf), hazard)


def _check(location: float, scale: float, law: str) -> None:
    if not (math.isfinite(location) and math.isfinite(scale) and scale > 0):
        raise ConfigError(f"a {law} needs a finite location and a scale above 0, got {location} and {scale}")
