"""An equivalence study as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.equivalence.compare import ArmRow, Comparison, TaskComparison, TunedArm
from evenpack.studies.equivalence.config import EquivalenceSection
from evenpack.studies.runs.arms import confidence_text, difference_text, interval_text, spread_text
from evenpack.studies.statistics.paired import PairedDifference

_DECIMALS = 4
"""Decimals of a loss in nats, and of an accuracy."""


def comparison_tables(comparison: Comparison, section: EquivalenceSection) -> list[RenderableType]:
    """Returns the results and the speed of each arm; only a note before a run has finished."""
    if not comparison.rows:
        return [console.text("No run of the compared phase has finished.")]
    unit = "nats/target" if section.measure == "loss" else "as a fraction"
    confidence = confidence_text(section.significance)
    learned = console.table(
        [_learned(row) for row in comparison.rows],
        title=(
            f"Held-out {section.measure} at the end, and its difference from {section.reference}, seed by seed, with "
            f"{confidence}s; margin ± {section.margin:g} {unit}"
        ),
    )
    shown: list[RenderableType] = [learned]
    if comparison.target is not None:
        shown.append(
            console.table(
                [_speed(row) for row in comparison.rows if row.speed is not None],
                title=(
                    f"To {section.measure} {comparison.target:.4g}, and sequences/s, relative to {section.reference}: "
                    "p is the ratio of slots per sequence"
                ),
            )
        )
    return shown + [console.text(line) for line in _undecided(comparison.rows)]


def tuned_tables(comparisons: Sequence[TaskComparison], section: EquivalenceSection) -> list[RenderableType]:
    """Returns the results of fine-tuning, run by run, and the differences of arms; nothing before one has finished."""
    if not comparisons:
        return []
    confidence = confidence_text(section.significance)
    arms = [(comparison, arm) for comparison in comparisons for arm in comparison.arms]
    return [
        console.table(
            [row for comparison, arm in arms for row in _tuned_runs(comparison, arm)],
            title="Fine-tuned: medians over fine-tuning seeds (95 %: bootstrap over the median seed's examples)",
        ),
        console.table(
            [_tuned_arm(comparison, arm) for comparison, arm in arms],
            title=f"Fine-tuned, minus {section.reference} (Student's {confidence}s of pairs)",
        ),
    ]


def _tuned_runs(comparison: TaskComparison, arm: TunedArm) -> list[dict[str, Any]]:
    return [
        {
            "task": comparison.task,
            "metric": comparison.metric,
            "arm": arm.arm,
            "run": f"seed {seed}",
            "seeds": len(tuned.values),
            "median": f"{tuned.median:.4f}",
            "95 %": f"{tuned.interval[0]:.4f} to {tuned.interval[1]:.4f}",
            "least": f"{min(tuned.values.values()):.4f}",
            "greatest": f"{max(tuned.values.values()):.4f}",
            "most frequent label": None if tuned.guess is None else f"{tuned.guess:.4f}",
        }
        for seed, tuned in arm.runs.items()
    ]


def _tuned_arm(comparison: TaskComparison, arm: TunedArm) -> dict[str, Any]:
    return {
        "task": comparison.task,
        "arm": arm.arm,
        "runs": len(arm.runs),
        "median, mean over runs": f"{arm.median:.4f}",
        **_difference(arm.difference),
        "pairs": None if arm.difference is None else arm.difference.pairs,
        "paired by": arm.paired_by or "",
    }


def _learned(row: ArmRow) -> dict[str, Any]:
    return {
        "arm": row.arm,
        "seeds": len(row.seeds),
        "loss": spread_text(row.loss, _DECIMALS),
        "accuracy": spread_text(row.accuracy, _DECIMALS),
        "next sentence": spread_text(row.next_sentence_accuracy, _DECIMALS),
        "training loss": spread_text(row.training_loss, _DECIMALS),
        "NSP noise": row.next_sentence_noise,
        "by denominators": row.denominator_noise,
        **_difference(row.difference),
        "verdict": row.verdict or "",
    }


def _speed(row: ArmRow) -> dict[str, Any]:
    speed = row.speed
    assert speed is not None, "rows without it are left out"
    return {
        "arm": row.arm,
        "sequences/step": round(row.sequences_per_step, 1),
        "samples to target": None if speed.samples_to_target is None else round(speed.samples_to_target),
        "seconds": speed.seconds_to_target,
        "samples, x": speed.samples_ratio,
        "time, x": speed.seconds_ratio,
        "p": speed.slots_ratio,
        "overhead": console.percent(speed.overhead),
        "p / (1 + overhead)": speed.rate_ratio,
        "bytes/sequence to device": round(row.host_to_device_bytes_per_sequence),
    }


def _difference(difference: PairedDifference | None) -> dict[str, Any]:
    return {"difference": difference_text(difference, _DECIMALS), "interval": interval_text(difference, _DECIMALS)}


def _undecided(rows: Sequence[ArmRow]) -> list[str]:
    lines = []
    for row in rows:
        if row.verdict != "undecided":
            continue
        needed = "more seeds than these allow to estimate"
        if row.seeds_to_decide is not None:
            needed = f"{row.seeds_to_decide} seeds, if they come out like these {len(row.seeds)}"
        lines.append(f"{row.arm} is undecided: it would take {needed}")
    return lines
