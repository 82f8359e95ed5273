"""The published speed-up on other numbers of devices, from one cluster's Gumbel (PackedBERT, sections 4.4, E)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from evenpack.studies.statistics.laws import Gumbel, expected_minima

PUBLISHED_CLUSTER = Gumbel(location=1.6038, scale=0.1288)
"""Speed-up of un-padding over padding, BERT-large, batch 32 per device (section E, listing 1)."""
PUBLISHED_DEVICES = 8
PUBLISHED_LENGTHS = "wikipedia_512"
"""Name of the lengths on which it was measured."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """The expected speed-up at a number of devices."""

    devices: int
    expected: float
    """By the published inference of one device's law, by quadrature."""


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """The published speed-up of un-padding by number of devices, inferred from 8."""

    fitted: Gumbel
    """Law of the 8."""
    single: Gumbel
    """Law of one device, by median and mode."""
    rows: tuple[PublishedRow, ...]
    expected_at_fitted: float
    """Mean that `single` predicts for the 8."""
    fitted_mean: float
    """Mean of their Gumbel; what `single` predicts differs by the error of the inference."""


def single_device_gumbel(cluster: Gumbel, devices: int) -> Gumbel:
    """Returns one device's Gumbel from the Gumbel of `devices` (equations 12 to 14), in closed form.

    1 - F_n(s) = (1 - F_1(s))^n holds at the cluster's median and mode. There F_1 is known, and -ln(-ln F_1) =
    (s - location) / scale is linear in s, so both equations together are a straight line through two points.
    """
    median = cluster.location - cluster.scale * math.log(math.log(2.0))
    at_median = _variate(math.log(0.5), devices)
    at_mode = _variate(math.log1p(-math.exp(-1.0)), devices)
    scale = (median - cluster.location) / (at_median - at_mode)
    return Gumbel(location=cluster.location - scale * at_mode, scale=scale)


def published_curve(counts: Sequence[int]) -> PublishedCurve:
    """Returns the expected speed-up of each of `counts` devices."""
    single = single_device_gumbel(PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
    inferred = expected_minima(single, [*counts, PUBLISHED_DEVICES]).tolist()
    rows = [PublishedRow(devices=count, expected=one) for count, one in zip(counts, inferred, strict=False)]
    return PublishedCurve(
        fitted=PUBLISHED_CLUSTER,
        single=single,
        rows=tuple(rows),
        expected_at_fitted=inferred[-1],
        fitted_mean=PUBLISHED_CLUSTER.mean,
    )


def _variate(log_survival: float, devices: int) -> float:
    """Returns -ln(-ln F_1) where the cluster's survival function is known."""
    return -math.log(-math.log(-special.expm1(log_survival / devices)))
