"""An equivalence study as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.columns import Column, table_of
from evenpack.studies.equivalence.compare import ArmRow, Comparison, TaskComparison
from evenpack.studies.equivalence.config import EquivalenceSection
from evenpack.studies.runs.arms import confidence_text

_LEARNED = (
    Column("arm"),
    Column("seeds", lambda row: len(row.seeds)),
    Column("loss", form=".4f"),
    Column("accuracy", form=".4f"),
    Column("next sentence", "next_sentence_accuracy", ".4f"),
    Column("training loss", "training_loss", ".4f"),
    Column("NSP noise", "next_sentence_noise"),
    Column("by denominators", "denominator_noise"),
    Column("difference", "difference.mean", "+.4f"),
    Column("interval", "difference.interval", "+.4f"),
    Column("verdict", missing=""),
)
_SPEED = (
    Column("arm"),
    Column("sequences/step", lambda row: round(row.sequences_per_step, 1)),
    Column("samples to target", "speed.samples_to_target", ",.0f"),
    Column("seconds", "speed.seconds_to_target"),
    Column("samples, x", "speed.samples_ratio"),
    Column("time, x", "speed.seconds_ratio"),
    Column("p", "speed.slots_ratio"),
    Column("overhead", "speed.overhead", ".2%"),
    Column("p / (1 + overhead)", "speed.rate_ratio"),
    Column("bytes/sequence to device", "host_to_device_bytes_per_sequence", ",.0f"),
)
_TIMES = {"seconds", "time, x", "overhead", "p / (1 + overhead)"}
"""Headings of the columns that seconds decide."""
_TUNED_RUNS = (
    Column("task", "task.task"),
    Column("metric", "task.metric"),
    Column("arm", "arm.arm"),
    Column("run", lambda row: f"seed {row['seed']}"),
    Column("seeds", lambda row: len(row["tuned"].values)),
    Column("median", "tuned.median", ".4f"),
    Column("95 %", lambda row: "{:.4f} to {:.4f}".format(*row["tuned"].interval)),
    Column("least", lambda row: min(row["tuned"].values.values()), ".4f"),
    Column("greatest", lambda row: max(row["tuned"].values.values()), ".4f"),
    Column("most frequent label", "tuned.guess", ".4f"),
)
_TUNED_ARMS = (
    Column("task", "task.task"),
    Column("arm", "arm.arm"),
    Column("runs", lambda row: len(row["arm"].runs)),
    Column("median, mean over runs", "arm.median", ".4f"),
    Column("difference", "arm.difference.mean", "+.4f"),
    Column("interval", "arm.difference.interval", "+.4f"),
    Column("pairs", "arm.difference.pairs"),
    Column("paired by", "arm.paired_by", missing=""),
)


def comparison_tables(comparison: Comparison, section: EquivalenceSection) -> list[RenderableType]:
    """Returns the results and the speed of each arm; only a note before a run has finished."""
    if not comparison.rows:
        return [console.text("No run of the compared phase has finished.")]
    unit = "nats/target" if section.measure == "loss" else "as a fraction"
    learned = table_of(
        comparison.rows,
        _LEARNED,
        title=(
            f"Held-out {section.measure} at the end, and its difference from {section.reference}, seed by seed, with "
            f"{confidence_text(section.significance)}s; margin ± {section.margin:g} {unit}"
        ),
    )
    shown: list[RenderableType] = [learned]
    if comparison.target is not None:
        title = (
            f"To {section.measure} {comparison.target:.4g}, and sequences/s, relative to {section.reference}: "
            "p is the ratio of slots per sequence"
        )
        columns = [column for column in _SPEED if section.compares_times or column.heading not in _TIMES]
        shown.append(table_of([row for row in comparison.rows if row.speed is not None], columns, title=title))
    lines = [*_undecided(comparison.rows), *_without_verdict(comparison, section)]
    return shown + [console.text(line) for line in lines]


def tuned_tables(comparisons: Sequence[TaskComparison], section: EquivalenceSection) -> list[RenderableType]:
    """Returns the results of fine-tuning, run by run, and the differences of arms; nothing before one has finished."""
    if not comparisons:
        return []
    arms: list[dict[str, Any]] = [
        {"task": comparison, "arm": arm} for comparison in comparisons for arm in comparison.arms
    ]
    runs = [{**row, "seed": seed, "tuned": tuned} for row in arms for seed, tuned in row["arm"].runs.items()]
    confidence = confidence_text(section.significance)
    return [
        table_of(
            runs,
            _TUNED_RUNS,
            title="Fine-tuned: medians over fine-tuning seeds (95 %: bootstrap over the median seed's examples)",
        ),
        table_of(arms, _TUNED_ARMS, title=f"Fine-tuned, minus {section.reference} (Student's {confidence}s of pairs)"),
    ]


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


def _without_verdict(comparison: Comparison, section: EquivalenceSection) -> list[str]:
    """Returns why no arm is called equivalent, if one is within the margin."""
    within = [row.arm for row in comparison.rows if row.verdict == "no verdict"]
    if not within:
        return []
    why = "the study has no control: name arms that must differ as equivalence.controls"
    if comparison.passed_controls:
        names = ", ".join(comparison.passed_controls)
        why = (
            f"it does not tell {names} from {section.reference}, which it must: choose a smaller margin before new runs"
        )
    return [f"No verdict on {', '.join(within)}: within the margin of {section.margin:g}, but {why}"]
