"""Compares arms with the reference: last values, differences between runs of one seed, and the cost of training."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenpack.studies.equivalence.config import EquivalenceSection
from evenpack.studies.equivalence.curves import Curve
from evenpack.studies.statistics.paired import (
    PairedDifference,
    Spread,
    Verdict,
    paired_difference,
    pairs_to_decide,
    verdict_of,
)

CurvesOfArms = Mapping[str, Mapping[int, Curve]]
"""Curves of the finished runs, by arm and seed."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The cost of an arm up to the target and over all samples.

    Ratios are means over pairs, above 1 where it is faster.
    """

    samples_to_target: float | None
    """Mean over seeds; None where one of them has not reached it, as are the next three."""
    seconds_to_target: float | None
    samples_ratio: float | None
    """Samples that the reference needs, divided by those of the arm."""
    seconds_ratio: float | None
    """Speed-up in seconds, which is the one that counts."""
    slots_ratio: float
    """Slots that the reference computes per sequence, divided by those of the arm: compared with padding to the
    pack's length this is the packing factor p."""
    rate_ratio: float
    """Sequences/s, divided by the reference's: p / (1 + overhead)."""

    @property
    def overhead(self) -> float:
        """Additional cost of a slot over one of the reference."""
        return self.slots_ratio / self.rate_ratio - 1.0


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """The results of one arm."""

    arm: str
    seeds: tuple[int, ...]
    """Seeds that have finished."""
    loss: Spread
    accuracy: Spread
    next_sentence_accuracy: Spread | None
    training_loss: Spread
    next_sentence_noise: float | None
    """Mean over seeds, as is the next; see `Curve`."""
    denominator_noise: float | None
    sequences_per_step: float
    host_to_device_bytes_per_sequence: float
    difference: PairedDifference | None
    """Difference of the measure from the reference; None for the reference, or without a common seed."""
    verdict: Verdict | None
    seeds_to_decide: int | None
    """For an undecided arm, the number of seeds that would decide, if they came out like these."""
    speed: Speed | None
    """Speed; None without a common seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms that have a finished run."""

    target: float | None
    """Value of the measure up to which times are taken; None before the reference has finished a run."""
    rows: tuple[ArmRow, ...]


def compare(curves: CurvesOfArms, section: EquivalenceSection) -> Comparison:
    """Compares the last evaluations, seed by seed. Arms without a curve are left out."""
    reference = curves.get(section.reference, {})
    target = section.target
    if target is None and reference:
        last = [curve.values(section.measure)[-1] for curve in reference.values()]
        target = max(last) if section.measure == "loss" else min(last)
    rows = [_row(arm, of_seed, reference, section, target) for arm, of_seed in curves.items() if of_seed]
    return Comparison(target=target, rows=tuple(rows))


def _row(
    arm: str,
    of_seed: Mapping[int, Curve],
    reference: Mapping[int, Curve],
    section: EquivalenceSection,
    target: float | None,
) -> ArmRow:
    found = list(of_seed.values())
    pairs = [(curve, reference[seed]) for seed, curve in of_seed.items() if seed in reference]
    difference = verdict = needed = None
    if arm != section.reference and pairs:
        difference = paired_difference(
            [curve.values(section.measure)[-1] for curve, _ in pairs],
            [curve.values(section.measure)[-1] for _, curve in pairs],
            significance=section.significance,
        )
        verdict = verdict_of(difference, margin=section.margin, larger_is_worse=section.measure == "loss")
        if verdict == "undecided":
            needed = pairs_to_decide(difference, margin=section.margin, significance=section.significance)
    return ArmRow(
        arm=arm,
        seeds=tuple(of_seed),
        loss=Spread.of([curve.loss[-1] for curve in found]),
        accuracy=Spread.of([curve.accuracy[-1] for curve in found]),
        next_sentence_accuracy=_over_seeds(
            [None if values is None else values[-1] for values in (curve.next_sentence_accuracy for curve in found)]
        ),
        training_loss=Spread.of([curve.training_loss for curve in found]),
        next_sentence_noise=_mean_over_seeds([curve.next_sentence_noise for curve in found]),
        denominator_noise=_mean_over_seeds([curve.denominator_noise for curve in found]),
        sequences_per_step=statistics.fmean(curve.sequences_per_step for curve in found),
        host_to_device_bytes_per_sequence=statistics.fmean(curve.host_to_device_bytes_per_sequence for curve in found),
        difference=difference,
        verdict=verdict,
        seeds_to_decide=needed,
        speed=_speed(pairs, section, target) if pairs and target is not None else None,
    )


def _over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Returns the spread over seeds; None if one of them has no value."""
    found = [value for value in values if value is not None]
    return Spread.of(found) if len(found) == len(values) else None


def _mean_over_seeds(values: Sequence[float | None]) -> float | None:
    spread = _over_seeds(values)
    return None if spread is None else spread.mean


def _speed(pairs: Sequence[tuple[Curve, Curve]], section: EquivalenceSection, target: float) -> Speed:
    slots = statistics.fmean(b.slots_per_sequence / a.slots_per_sequence for a, b in pairs)
    rate = statistics.fmean(a.sequences_per_second / b.sequences_per_second for a, b in pairs)
    ways = [(a.reaches(target, section.measure), b.reaches(target, section.measure)) for a, b in pairs]
    reached = [(a, b) for a, b in ways if a is not None and b is not None]
    if len(reached) < len(pairs):
        samples = seconds = samples_ratio = seconds_ratio = None
    else:
        samples, seconds = (statistics.fmean(a[part] for a, _ in reached) for part in (0, 1))
        samples_ratio, seconds_ratio = (statistics.fmean(b[part] / a[part] for a, b in reached) for part in (0, 1))
    return Speed(
        samples_to_target=samples,
        seconds_to_target=seconds,
        samples_ratio=samples_ratio,
        seconds_ratio=seconds_ratio,
        slots_ratio=slots,
        rate_ratio=rate,
    )
