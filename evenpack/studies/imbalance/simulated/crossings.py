"""The numbers of devices at which a scheme stops being faster than packs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evenpack.studies.imbalance.simulated.cluster import BALANCED_PACKS, BASELINE, DENSE_PACKS, SCHEMES, Scheme
from evenpack.studies.imbalance.simulated.step_times import StepTimes, log_ratio

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
