"""Speed-up of un-padding by device count, as PackedBERT infers it from one cluster's Gumbel (sections 4.4, E)."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy import special

from evenpack.errors import ConfigError
from evenpack.studies.statistics.laws import Gumbel, expected_minima

PUBLISHED_CLUSTER = Gumbel(location=1.6038, scale=0.1288)
"""Speed-up of un-padding over padding, BERT-large, batch 32 per device (section E, listing 1)."""
PUBLISHED_DEVICES = 8
PUBLISHED_LENGTHS = "wikipedia_512"
"""Name of the lengths on which it was measured."""
PUBLISHED_PACKING = 1.913
"""Speed-up of packing over padding, at every device count (section 4.4)."""

_DRAWS = 200_000
"""Draws of each minimum by its own inverse distribution function."""
_REAL_DRAWS = 1 << 21
"""Single-device draws for each count whose minima are actually taken."""
_REAL_MINIMA_UP_TO = 4096
"""Largest number of devices for that: beyond, fewer than 512 minima would result."""


@dataclass(frozen=True, kw_only=True)
class ReferenceRow:
    """The expected speed-up at a number of devices."""

    devices: int
    expected: float
    """Expected speed-up by the published inference, by quadrature."""
    monte_carlo: float
    """The same by drawing minima from their own distribution."""
    monte_carlo_error: float
    """Standard error of that."""
    real_minima: float | None
    """The same as the mean minimum of actually drawn devices, by another generator; None above 4,096 devices."""
    real_minima_error: float | None
    by_moments: float
    """Expected speed-up if one device's Gumbel is to match the cluster's mean and deviation instead of its median
    and mode."""
    direct: float
    """Expected speed-up if the cluster is a Gumbel and one device has the law that follows."""
    spread: float
    """Range of the three inferences: the uncertainty from the choice of the law."""


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """The prediction of one cluster's Gumbel for other counts."""

    fitted: Gumbel
    """Gumbel of the cluster."""
    devices: int
    """Devices of the cluster."""
    single: Gumbel
    """Gumbel of one device, by median and mode."""
    single_by_moments: Gumbel
    rows: tuple[ReferenceRow, ...]
    expected_at_fitted: float
    """Mean that `single` predicts for the cluster."""
    fitted_mean: float
    """Mean of the cluster's Gumbel."""
    model_error_at_fitted: float
    """Error of the inference: the first minus the second."""

    @property
    def name(self) -> str:
        """Returns a name for people."""
        is_published = (self.fitted, self.devices) == (PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
        return "published (BERT, 512)" if is_published else "reference"


def single_device_gumbel(cluster: Gumbel, devices: int) -> Gumbel:
    """Returns one device's Gumbel from that of `devices` (equations 12 to 14), in closed form.

    1 - F_n(s) = (1 - F_1(s))^n holds at the cluster's median and mode. There F_1 is known, and -ln(-ln F_1) =
    (s - location) / scale is linear in s, so both equations together are a straight line through two points.
    Raises: ConfigError if `devices` is not a positive integer.
    """
    (devices,) = device_counts([devices])
    median = cluster.location - cluster.scale * math.log(math.log(2.0))
    at_median = _variate(math.log(0.5), devices)
    at_mode = _variate(math.log1p(-math.exp(-1.0)), devices)
    scale = (median - cluster.location) / (at_median - at_mode)
    return Gumbel(location=cluster.location - scale * at_mode, scale=scale)


def single_device_gumbel_by_moments(cluster: Gumbel, devices: int) -> Gumbel:
    """Returns one device's Gumbel whose minimum of `devices` draws has the cluster's mean and deviation.

    Raises: ConfigError if `devices` is not a positive integer.
    """
    (devices,) = device_counts([devices])
    standard = Gumbel(location=0.0, scale=1.0)
    mean = float(expected_minima(standard, [devices])[0])
    square = float(expected_minima(_Squared(law=standard), [devices])[0])
    scale = math.pi / math.sqrt(6.0) * cluster.scale / math.sqrt(square - mean**2)
    return Gumbel(location=cluster.mean - scale * mean, scale=scale)


def reference_curve(cluster: Gumbel, devices: int, counts: Sequence[int], *, seed: int = 0) -> ReferenceCurve:
    """Returns the expected speed-up of each of `counts` devices, given the Gumbel of a cluster of `devices`.

    Raises: ConfigError for counts that are not positive integers.
    """
    checked = device_counts(counts)
    (devices,) = device_counts([devices])
    single = single_device_gumbel(cluster, devices)
    by_moments = single_device_gumbel_by_moments(cluster, devices)
    columns = zip(
        checked,
        expected_minima(single, checked).tolist(),
        expected_minima(by_moments, checked).tolist(),
        expected_minima(cluster, [count / devices for count in checked]).tolist(),
        strict=True,
    )
    expected_at_fitted = float(expected_minima(single, [devices])[0])
    return ReferenceCurve(
        fitted=cluster,
        devices=devices,
        single=single,
        single_by_moments=by_moments,
        rows=tuple(_row(single, *column, seed=seed) for column in columns),
        expected_at_fitted=expected_at_fitted,
        fitted_mean=cluster.mean,
        model_error_at_fitted=expected_at_fitted - cluster.mean,
    )


def device_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns the same counts as plain integers.

    Raises: ConfigError unless all are positive integers and there is one.
    """
    try:
        checked = tuple(operator.index(count) for count in counts)
    except TypeError:
        checked = ()
    if not checked or min(checked) < 1:
        raise ConfigError(f"device counts must be positive integers, got {list(counts)}")
    return checked


@dataclass(frozen=True, kw_only=True)
class _Squared:
    """The square of the minimum: no law itself, but its expectation is the same integral."""

    law: Gumbel

    def at_hazard(self, hazard: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        return self.law.at_hazard(hazard) ** 2

    def has_mean(self, devices: float) -> bool:
        return self.law.has_mean(devices)


def _variate(log_survival: float, devices: int) -> float:
    """Returns -ln(-ln F_1) where the cluster's survival function is known."""
    return -math.log(-math.log(-special.expm1(log_survival / devices)))


def _row(single: Gumbel, devices: int, expected: float, by_moments: float, direct: float, *, seed: int) -> ReferenceRow:
    random = np.random.default_rng([seed, devices])
    drawn = _mean_and_error(single.at_hazard(random.standard_exponential(_DRAWS) / devices))
    real: tuple[float | None, float | None] = (None, None)
    if devices <= _REAL_MINIMA_UP_TO:
        steps = min(_DRAWS, _REAL_DRAWS // devices)
        real = _mean_and_error(random.gumbel(single.location, single.scale, (steps, devices)).min(axis=1))
    return ReferenceRow(
        devices=devices,
        expected=expected,
        monte_carlo=drawn[0],
        monte_carlo_error=drawn[1],
        real_minima=real[0],
        real_minima_error=real[1],
        by_moments=by_moments,
        direct=direct,
        spread=max(expected, by_moments, direct) - min(expected, by_moments, direct),
    )


def _mean_and_error(draws: Float64[np.ndarray, " draws"]) -> tuple[float, float]:
    return float(draws.mean()), float(draws.std(ddof=1) / math.sqrt(len(draws)))
