"""Compares arms with the reference: last values, differences between runs of one seed, samples, and fine-tuning.

metrics.jsonl of a run -> Curve, validation against samples seen -> ArmRow, one for each arm
results of a run's fine-tuning for one task -> Tuned -> TunedArm
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from evenpack.engine.reporting.metrics import METRICS
from evenpack.errors import DataError
from evenpack.finetuning.results import ResultFolder
from evenpack.studies.equivalence.config import EquivalenceSection, Measure
from evenpack.studies.runs.arms import difference_from, over_seeds, read_steps, weighted_mean
from evenpack.studies.statistics.paired import PairedDifference, Spread, Verdict, verdict_of


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of one run."""

    samples: tuple[int, ...]
    """Sequences trained on so far."""
    loss: tuple[float, ...]
    """Held-out loss in nats/target, over all sources."""
    accuracy: tuple[float, ...]
    next_sentence_accuracy: tuple[float, ...] | None
    """Accuracy; None for a model without next-sentence prediction."""
    training_loss: float
    """Loss in nats/target, over the arm's own batches in the last tenth of its trained steps."""
    sequences_per_step: float
    """Over the trained steps."""
    slots_per_sequence: float
    """Slots computed per sequence, including padding."""
    host_to_device_bytes_per_sequence: float
    """Bytes that batches move to the devices, per sequence."""

    def values(self, measure: Measure) -> tuple[float, ...]:
        return self.loss if measure == "loss" else self.accuracy

    def reaches(self, target: float, measure: Measure) -> float | None:
        """Returns the samples at which the measure first reaches the target; None if it never does.

        Values between evaluations are interpolated linearly.
        """
        sign = -1.0 if measure == "loss" else 1.0
        values = [sign * value for value in self.values(measure)]
        for index, value in enumerate(values):
            if value >= sign * target:
                return self._between(index, values, sign * target)
        return None

    def _between(self, index: int, values: Sequence[float], goal: float) -> float:
        if index == 0:
            return float(self.samples[0])
        share = (goal - values[index - 1]) / (values[index] - values[index - 1])
        return self.samples[index - 1] + share * (self.samples[index] - self.samples[index - 1])


CurvesOfArms = Mapping[str, Mapping[int, Curve]]
"""Curves of the finished runs, by arm and seed."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The samples and slots of an arm. Ratios are means over pairs, above 1 where it needs less."""

    samples_to_target: float | None
    """Mean over seeds; None where one of them has not reached it, as is the next."""
    samples_ratio: float | None
    """Samples that the reference needs, divided by the arm's."""
    slots_ratio: float
    """Slots that the reference computes per sequence, divided by the arm's: compared with padding to the
    pack's length this is the packing factor p."""


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
    sequences_per_step: float
    host_to_device_bytes_per_sequence: float
    difference: PairedDifference | None
    """Difference of the measure from the reference; None for the reference, or without a common seed."""
    verdict: Verdict | None
    speed: Speed | None
    """Speed; None without a common seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms that have a finished run."""

    target: float | None
    """Value of the measure up to which samples are counted; None before the reference has finished a run."""
    rows: tuple[ArmRow, ...]
    passed_controls: tuple[str, ...] = ()
    """Controls that the margin does not tell from the reference, or that have not finished."""


PairedBy = Literal["pretraining seed", "fine-tuning seed"]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The results of one run's weights, fine-tuned for one task."""

    title: str
    """Title of the task."""
    metric: str
    """Metric by which seeds are ranked, of the first development file."""
    values: dict[int, float]
    """Values by fine-tuning seed."""
    median: float
    median_seed: int
    interval: tuple[float, float]
    """95 % of the median seed by bootstrap over its development examples, as `evenpack finetune` prints it."""
    guess: float | None
    """Score of the most frequent label of the training file; None for spans."""


TunedOfArms = Mapping[str, Mapping[int, Tuned]]
"""Finished fine-tunings for one task, by arm and pretraining seed."""


@dataclass(frozen=True, kw_only=True)
class TunedArm:
    """One arm, fine-tuned for one task."""

    arm: str
    runs: Mapping[int, Tuned]
    """Results by pretraining seed."""
    median: float
    """Median of each pretraining seed's fine-tuning seeds; mean over pretraining seeds."""
    difference: PairedDifference | None
    """Difference from the reference; None for the reference, or without a common pretraining seed."""
    paired_by: PairedBy | None
    """The kind of pairs: pretraining seeds with their medians, or the fine-tuning seeds of a single one."""


@dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """All arms that have been fine-tuned for one task."""

    task: str
    """Name of the task in the study file."""
    title: str
    metric: str
    guess: float | None
    arms: tuple[TunedArm, ...]


def read_curve(output_dir: Path) -> Curve:
    """Reads the log. Skipped steps have no samples and losses.

    Raises: DataError if it has no evaluation or no trained step, lacks a step up to which samples are counted, or has a
        loss that is not finite.
    """
    path = output_dir / METRICS
    records, trained = read_steps(output_dir)
    samples, points = 0, []
    for record in records:
        samples += record["sequences"]
        found = [values for values in (record.get("validation") or {}).values() if values is not None]
        if found:
            points.append((samples, found))
    if not points:
        raise DataError(f"{path} has no evaluation: set training.evaluate_every_steps and data.validation_fraction")
    last = trained[-math.ceil(len(trained) / 10) :]
    losses = [values["loss"] for _, found in points for values in found] + [record["loss"] for record in last]
    if None in losses:
        raise DataError(
            f"{path} has a loss that is not finite, so the run has diverged and cannot be compared: train it again "
            "with a lower optimizer.learning_rate"
        )
    has_pairs = all("next_sentence_accuracy" in values for _, found in points for values in found)

    def series(name: str, weight: str) -> tuple[float, ...]:
        return tuple(weighted_mean(found, name, weight) for _, found in points)

    return Curve(
        samples=tuple(point[0] for point in points),
        loss=series("loss", "targets"),
        accuracy=series("accuracy", "targets"),
        next_sentence_accuracy=series("next_sentence_accuracy", "sequences") if has_pairs else None,
        training_loss=weighted_mean(last, "token_loss" if "token_loss" in last[0] else "loss", "targets"),
        sequences_per_step=samples / len(trained),
        slots_per_sequence=sum(record["slots"] for record in records) / samples,
        host_to_device_bytes_per_sequence=sum(record["host_to_device_bytes"] for record in records) / samples,
    )


def compare(curves: CurvesOfArms, section: EquivalenceSection) -> Comparison:
    """Compares the last evaluations, seed by seed. Arms without a curve are left out."""
    reference = curves.get(section.reference, {})
    target = section.target
    if target is None and reference:
        last = [curve.values(section.measure)[-1] for curve in reference.values()]
        target = max(last) if section.measure == "loss" else min(last)
    rows = [_row(arm, of_seed, reference, section, target) for arm, of_seed in curves.items() if of_seed]
    told_apart = {row.arm for row in rows if row.verdict in {"worse", "better"}}
    undetected = tuple(control for control in section.controls if control not in told_apart)
    if undetected or not section.controls:
        rows = [replace(row, verdict="no verdict") if row.verdict == "equivalent" else row for row in rows]
    return Comparison(target=target, rows=tuple(rows), passed_controls=undetected)


def read_tuned(output_dir: Path) -> Tuned:
    """Reads the results of one fine-tuning. Raises: DataError if they cannot be read."""
    summary = ResultFolder(output_dir).read_summary()
    name = next(iter(summary.medians))
    of_seed = {seed.seed: seed for seed in summary.seeds}
    return Tuned(
        title=summary.task,
        metric=summary.headline,
        values={seed: result.metrics[name][summary.headline] for seed, result in of_seed.items()},
        median=summary.medians[name][summary.headline],
        median_seed=summary.median_seed,
        interval=of_seed[summary.median_seed].intervals[name][summary.headline],
        guess=summary.guesses[name][summary.headline] if name in summary.guesses else None,
    )


def compare_tuned(task: str, tuned: TunedOfArms, section: EquivalenceSection) -> TaskComparison | None:
    """Compares arms for one task. Arms without a finished fine-tuning are left out; None if nothing has finished."""
    found = {arm: of_seed for arm, of_seed in tuned.items() if of_seed}
    if not found:
        return None
    first = next(iter(next(iter(found.values())).values()))
    reference = found.get(section.reference, {})
    return TaskComparison(
        task=task,
        title=first.title,
        metric=first.metric,
        guess=first.guess,
        arms=tuple(_tuned_arm(arm, of_seed, reference, section) for arm, of_seed in found.items()),
    )


def _row(
    arm: str,
    of_seed: Mapping[int, Curve],
    reference: Mapping[int, Curve],
    section: EquivalenceSection,
    target: float | None,
) -> ArmRow:
    found = list(of_seed.values())
    pairs = [(curve, reference[seed]) for seed, curve in of_seed.items() if seed in reference]
    difference = verdict = None
    if arm != section.reference:
        difference = difference_from(
            reference, of_seed, lambda curve: curve.values(section.measure)[-1], significance=section.significance
        )
    if difference is not None:
        verdict = verdict_of(difference, margin=section.margin, larger_is_worse=section.measure == "loss")
    return ArmRow(
        arm=arm,
        seeds=tuple(of_seed),
        loss=Spread.of([curve.loss[-1] for curve in found]),
        accuracy=Spread.of([curve.accuracy[-1] for curve in found]),
        next_sentence_accuracy=over_seeds(
            [None if values is None else values[-1] for values in (curve.next_sentence_accuracy for curve in found)]
        ),
        training_loss=Spread.of([curve.training_loss for curve in found]),
        sequences_per_step=statistics.fmean(curve.sequences_per_step for curve in found),
        host_to_device_bytes_per_sequence=statistics.fmean(curve.host_to_device_bytes_per_sequence for curve in found),
        difference=difference,
        verdict=verdict,
        speed=_speed(pairs, section, target) if pairs and target is not None else None,
    )


def _speed(pairs: Sequence[tuple[Curve, Curve]], section: EquivalenceSection, target: float) -> Speed:
    needed = [(a.reaches(target, section.measure), b.reaches(target, section.measure)) for a, b in pairs]
    reached = [(a, b) for a, b in needed if a is not None and b is not None]
    has_all = len(reached) == len(pairs)
    return Speed(
        samples_to_target=statistics.fmean(a for a, _ in reached) if has_all else None,
        samples_ratio=statistics.fmean(b / a for a, b in reached) if has_all else None,
        slots_ratio=statistics.fmean(b.slots_per_sequence / a.slots_per_sequence for a, b in pairs),
    )


def _tuned_arm(
    arm: str, of_seed: Mapping[int, Tuned], reference: Mapping[int, Tuned], section: EquivalenceSection
) -> TunedArm:
    difference = paired_by = None
    if arm != section.reference:
        difference, paired_by = _tuned_difference(of_seed, reference, section.significance)
    return TunedArm(
        arm=arm,
        runs=of_seed,
        median=statistics.fmean(tuned.median for tuned in of_seed.values()),
        difference=difference,
        paired_by=paired_by,
    )


def _tuned_difference(
    of_seed: Mapping[int, Tuned], reference: Mapping[int, Tuned], significance: float
) -> tuple[PairedDifference | None, PairedBy | None]:
    """Returns the difference over pretraining seeds; with a single one only its fine-tuning seeds vary."""
    common = [seed for seed in of_seed if seed in reference]
    if not common:
        return None, None
    if len(common) > 1:
        medians = difference_from(reference, of_seed, lambda tuned: tuned.median, significance=significance)
        return medians, "pretraining seed"
    one, other = of_seed[common[0]].values, reference[common[0]].values
    return difference_from(other, one, float, significance=significance), "fine-tuning seed"
