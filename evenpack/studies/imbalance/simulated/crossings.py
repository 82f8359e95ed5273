"""The numbers of devices at which a scheme stops being faster than packs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evenpack.studies.imbalance.simulated.cluster import BALANCED_PACKS, BASELINE, DENSE_PACKS, SCHEMES, Scheme
from evenpack.studies.imbalance.simulated.step_times import NORMAL_95, StepTimes, log_ratio

Verdict = Literal["ahead everywhere", "behind everywhere", "falls behind", "gets ahead", "undecided"]
"""The verdict over the simulated counts. Undecided: at each of them the difference is below the 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A scheme compared with a way to pack."""

    layout: str
    policy: str
    against: str
    """`Scheme.label` of the packs."""
    verdict: Verdict
    devices: float | None
    """Devices where both are equally fast, interpolated in the logarithm of devices; None if they do not cross."""
    low: float | None
    """Start of the 95 % interval: where the lower and the upper bound of the ratio cross 1, or an end of the
    simulated counts."""
    high: float | None


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
    values = [ratio.value for ratio in ratios]
    reaches = [NORMAL_95 * ratio.error for ratio in ratios]
    verdict = _verdict(values, reaches)
    devices = low = high = None
    if verdict in ("falls behind", "gets ahead"):
        falling = verdict == "falls behind"
        bounds = [[value + sign * reach for value, reach in zip(values, reaches, strict=True)] for sign in (-1, 1)]
        low, high = sorted(_zero(counts, bound, falling=falling) for bound in bounds)
        devices = _zero(counts, values, falling=falling)
    return Crossing(
        layout=scheme.layout,
        policy=scheme.policy,
        against=packs.label,
        verdict=verdict,
        devices=devices,
        low=low,
        high=high,
    )


def _verdict(values: Sequence[float], reaches: Sequence[float]) -> Verdict:
    signs = [0 if abs(value) <= reach else int(np.sign(value)) for value, reach in zip(values, reaches, strict=True)]
    decided = [sign for sign in signs if sign]
    if not decided:
        return "undecided"
    if len(set(decided)) == 1:
        return "ahead everywhere" if decided[0] > 0 else "behind everywhere"
    return "falls behind" if decided[0] > 0 else "gets ahead"


def _zero(counts: Sequence[int], values: Sequence[float], *, falling: bool) -> float:
    """Returns the first zero of values linear in log2(devices), or an end of the counts if there is none."""
    signed = np.array(values) if falling else -np.array(values)
    if signed[0] <= 0:
        return float(counts[0])
    below = np.flatnonzero(signed <= 0)
    if not len(below):
        return float(counts[-1])
    after = int(below[0])
    before = after - 1
    share = signed[before] / (signed[before] - signed[after])
    low, high = np.log2(counts[before]), np.log2(counts[after])
    return float(2.0 ** (low + share * (high - low)))
