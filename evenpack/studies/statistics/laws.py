"""Laws of a random speed-up or time, and the expected minimum and maximum of several draws, for the slowest rank.

Densities, distribution functions and fits are SciPy's (`frozen`, `fit`), but for the generalised extreme value law's
likelihood: a bootstrap fits it hundreds of times, and SciPy's way through its checks takes eight times as long.

Minima and maxima are computed from the cumulative hazard H(s) = -ln(1 - F(s)), whose inverse SciPy lacks. The minimum
of n draws has n * H(s), for any n > 0, so no power of a survival function is ever taken and nothing underflows at a
million devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float64
from scipy import optimize, special, stats

from evenpack.errors import ConfigError, FitError

_STEP = 1 / 8
"""Step of the trapezoidal rule over ln H, in which the integrand is analytic: its error is below 1e-16."""
_NODES = np.exp(np.arange(-45.0, math.log(700.0), _STEP))
_WEIGHTS = _STEP * _NODES * np.exp(-_NODES)
_LARGE_HAZARD = 36.0
"""From here on -ln(-ln F) and H are equal in double precision."""
_OUTSIDE_LOSS = 100 * math.log(np.finfo(np.float64).max)
"""Loss of a value outside of a law's support."""
_LARGEST_SHAPE = 0.99
"""Below -1 the likelihood has no maximum, above 1 the law has no mean."""


@runtime_checkable
class Law(Protocol):
    """A continuous distribution of speed-ups."""

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Returns the speed-up s at which -ln(1 - F(s)) is `hazard`; of an exponential variate it is a draw."""
        ...

    def has_mean(self, devices: float) -> bool:
        """Returns whether the minimum of `devices` draws has a finite mean."""
        ...


LawT = TypeVar("LawT", bound="_Scaled")


@dataclass(frozen=True, kw_only=True)
class _Scaled:
    """A law of SciPy's with a location, and a scale above 0."""

    distribution: ClassVar[Any]
    name: ClassVar[str]
    location: float
    scale: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.location) and math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(
                f"a {self.name} needs a finite location and a scale above 0, got {self.location} and {self.scale}"
            )

    @classmethod
    def fit(cls: type[LawT], values: Float64[np.ndarray, " values"]) -> LawT:
        """Fits by maximum likelihood."""
        location, scale = cls.distribution.fit(values)
        return cls(location=float(location), scale=float(scale))

    @property
    def frozen(self) -> Any:
        """Returns SciPy's distribution."""
        return self.distribution(self.location, self.scale)

    def has_mean(self, devices: float) -> bool:
        return devices > 0


@dataclass(frozen=True, kw_only=True)
class Gumbel(_Scaled):
    """Right-skewed Gumbel, F(s) = exp(-exp(-(s - location) / scale))."""

    distribution: ClassVar[Any] = stats.gumbel_r
    name: ClassVar[str] = "Gumbel"

    @property
    def mean(self) -> float:
        return self.location + float(np.euler_gamma) * self.scale

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        return self.location + self.scale * _gumbel_variate(hazard)


@dataclass(frozen=True, kw_only=True)
class Normal(_Scaled):
    """Normal law; the scale is its standard deviation."""

    distribution: ClassVar[Any] = stats.norm
    name: ClassVar[str] = "normal law"

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        low = special.ndtri(-np.expm1(-np.minimum(hazard, 1.0)))
        high = -special.ndtri_exp(-np.maximum(hazard, 0.5))
        variate: Float64[np.ndarray, "*shape"] = np.where(hazard < math.log(2.0), low, high)
        return self.location + self.scale * variate


@dataclass(frozen=True, kw_only=True)
class GeneralisedExtremeValue(_Scaled):
    """F(s) = exp(-(1 + shape z)^(-1 / shape)) with z = (s - location) / scale; shape 0 is the Gumbel.

    A shape below 0 ends at location - scale / shape, one above 0 has a heavy upper tail. SciPy's `c` is -shape.
    """

    distribution: ClassVar[Any] = stats.genextreme
    name: ClassVar[str] = "generalised extreme value law"
    shape: float

    @classmethod
    def fit(cls, values: Float64[np.ndarray, " values"]) -> "GeneralisedExtremeValue":
        """Fits by maximum likelihood, starting at the fitted Gumbel: SciPy's own start fails for bounded laws.

        Raises: FitError if the likelihood has no maximum at a shape with a mean.
        """
        gumbel = Gumbel.fit(values)
        start = (-0.1, gumbel.location, gumbel.scale)
        found = optimize.minimize(_extreme_value_loss, start, args=(values,), method="Nelder-Mead")
        if not found.success:
            raise FitError(f"the likelihood has no maximum that could be found: {found.message}")
        shape, location, scale = found.x.tolist()
        if abs(shape) >= _LARGEST_SHAPE:
            raise FitError(f"the likelihood has no maximum that could be found; it still rises at shape {shape:.3g}")
        return cls(location=location, scale=scale, shape=shape)

    @property
    def frozen(self) -> Any:
        """Returns SciPy's distribution."""
        return self.distribution(-self.shape, self.location, self.scale)

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        variate = _gumbel_variate(hazard)
        bent: Float64[np.ndarray, "*shape"] = variate * special.exprel(self.shape * variate)
        return self.location + self.scale * bent

    def has_mean(self, devices: float) -> bool:
        return devices > self.shape


def expected_minima(law: Law, devices: Sequence[float | int]) -> Float64[np.ndarray, " counts"]:
    """Returns the expected minimum of each number of independent draws from `law`.

    E[min] = integral of s(t / devices) exp(-t) dt over t > 0, where s is `law.at_hazard`. Fractions are allowed: if
    `law` describes a cluster of n, then m / n draws represent m devices. Infinite where the mean does not exist.
    """
    counts = np.asarray(devices, dtype=np.float64)
    finite = np.array([law.has_mean(count) for count in counts.tolist()], dtype=bool)
    expected = np.full(counts.shape, np.inf)
    expected[finite] = law.at_hazard(_NODES / counts[finite, None]) @ _WEIGHTS
    return expected


def minimum_weights(values: int, draws: float | int) -> Float64[np.ndarray, " values"]:
    """Returns the probability that the i-th lowest of n values is the lowest of `draws` draws with replacement.

    It is ((n - i + 1) / n)^draws - ((n - i) / n)^draws.
    """
    weights: Float64[np.ndarray, " values"] = -np.diff((np.arange(values, -1, -1) / values) ** draws)
    return weights


def _gumbel_variate(hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns -ln(-ln F) at a hazard, exact in both tails."""
    log_cdf = _log_complement(np.minimum(hazard, _LARGE_HAZARD))
    return np.where(hazard < _LARGE_HAZARD, -np.log(-log_cdf), hazard)


def _log_complement(hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns ln(1 - exp(-hazard)), which is ln F, exact in both tails."""
    low = np.log(-np.expm1(-np.minimum(hazard, 1.0)))
    high = np.log1p(-np.exp(-np.maximum(hazard, 0.5)))
    found: Float64[np.ndarray, "*shape"] = np.where(hazard < math.log(2.0), low, high)
    return found


def _extreme_value_loss(
    parameters: Float64[np.ndarray, " shape_location_scale"], values: Float64[np.ndarray, " values"]
) -> float:
    """Returns minus the log-likelihood, with a penalty for each value outside of the support, as in SciPy's `fit`.

    With y = ln(1 + shape z) / shape, which is z at shape 0, ln F' = -exp(-y) - y - shape y - ln scale.
    """
    shape, location, scale = parameters.tolist()
    if scale <= 0:
        return math.inf
    z = (values - location) / scale
    z = z[shape * z > -1]
    logarithm = np.log1p(shape * z)
    y = logarithm / shape if shape else z
    with np.errstate(over="ignore"):  # infinitely unlikely
        loss = float((np.exp(-y) + y + logarithm).sum())
    return loss + len(values) * math.log(scale) + _OUTSIDE_LOSS * (len(values) - len(z))
