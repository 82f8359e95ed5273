"""Compares arms with the reference after fine-tuning: medians over fine-tuning seeds, and differences of pairs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evenpack.finetuning.results import ResultFolder
from evenpack.studies.equivalence.config import EquivalenceSection
from evenpack.studies.statistics.paired import PairedDifference, paired_difference

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
    return TaskComparison(
        task=task,
        title=first.title,
        metric=first.metric,
        guess=first.guess,
        arms=tuple(_arm(arm, of_seed, found.get(section.reference, {}), section) for arm, of_seed in found.items()),
    )


def _arm(
    arm: str, of_seed: Mapping[int, Tuned], reference: Mapping[int, Tuned], section: EquivalenceSection
) -> TunedArm:
    pairs = [(tuned, reference[seed]) for seed, tuned in of_seed.items() if seed in reference]
    difference = paired_by = None
    if arm != section.reference and pairs:
        difference, paired_by = _difference(pairs, section.significance)
    return TunedArm(
        arm=arm,
        runs=of_seed,
        median=statistics.fmean(tuned.median for tuned in of_seed.values()),
        difference=difference,
        paired_by=paired_by,
    )


def _difference(pairs: Sequence[tuple[Tuned, Tuned]], significance: float) -> tuple[PairedDifference, PairedBy]:
    """Returns the difference over pretraining seeds; with a single one only its fine-tuning seeds vary."""
    if len(pairs) > 1:
        medians = ([one.median for one, _ in pairs], [other.median for _, other in pairs])
        return paired_difference(*medians, significance=significance), "pretraining seed"
    one, other = pairs[0]
    common = [seed for seed in one.values if seed in other.values]
    values = ([one.values[seed] for seed in common], [other.values[seed] for seed in common])
    return paired_difference(*values, significance=significance), "fine-tuning seed"
