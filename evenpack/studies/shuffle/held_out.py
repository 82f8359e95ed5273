"""Held-out loss by kind of text: what each order of training has learned of each of its sources.

Every finished run is evaluated on held-out text of each kind by `evenpack evaluate --data`. An arm is compared with the
reference by runs of equal seeds, kind by kind and by the mean of the kinds, and the verdicts of all these comparisons
are corrected for their number together.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from evenpack.data.sources.files import find_files
from evenpack.errors import ConfigError, DataError
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import INK, write_title
from evenpack.studies.runs.arms import (
    arm_label,
    confidence_text,
    difference_from,
    loss_of_evaluation,
    with_verdicts,
)
from evenpack.studies.runs.jobs import Evaluation, StudyRun, evaluation_of
from evenpack.studies.shuffle.config import MEAN_OF_KINDS, ShuffleSection, ShuffleStudyConfig
from evenpack.studies.statistics.paired import FamilyVerdict, PairedDifference, Spread


@dataclass(frozen=True, kw_only=True)
class HeldOutRow:
    """An arm's loss on one kind of held-out text."""

    kind: str
    arm: str
    losses: Mapping[int, float]
    """Loss by seed, in nats/token."""
    loss: Spread
    difference: PairedDifference | None
    """Difference from the reference, by runs of equal seeds; None for the reference, and without such runs."""
    verdict: FamilyVerdict | None
    """Among all comparisons of the study's held-out losses; None without a difference."""


LossesByKind = Mapping[str, Mapping[str, Mapping[int, float]]]
"""Held-out losses by kind of text, arm and seed."""


def evaluations_on_text(study: ShuffleStudyConfig, runs: Sequence[StudyRun]) -> tuple[Evaluation, ...]:
    """Returns the evaluations that follow each of the runs. Raises: ConfigError."""
    return tuple(
        evaluation_of(run, kind, {}, study_dir=study.study.output_dir, text=path)
        for run in runs
        for kind, path in study.shuffle.held_out.items()
        if path is not None
    )


def require_text(section: ShuffleSection) -> None:
    """Checks that each kind of held-out text has a path that leads to a file. Raises: ConfigError."""
    for kind, path in section.held_out.items():
        found = "names no text"
        if path is not None:
            try:
                find_files(kind, path, suffixes=None)
                continue
            except DataError:
                found = f"names {path}, where there is no file"
        raise ConfigError(
            f"shuffle.held_out.{kind} {found}: give shuffle.held_out.{kind}=FILE on the command line, or leave all "
            "held-out text out with shuffle.held_out={}"
        )


def read_losses_by_kind(evaluations: Sequence[Evaluation]) -> dict[str, dict[str, dict[int, float]]]:
    """Reads the evaluations that have ended, and adds the mean of the kinds where a run has all. Raises: DataError."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for evaluation in evaluations:
        loss = loss_of_evaluation(evaluation)
        if loss is not None:
            found.setdefault(evaluation.name, {}).setdefault(evaluation.arm, {})[evaluation.seed] = loss
    runs = list(dict.fromkeys((evaluation.arm, evaluation.seed) for evaluation in evaluations))
    means: dict[str, dict[int, float]] = {}
    for arm, seed in runs if len(found) > 1 else []:
        losses = [of_arm[arm][seed] for of_arm in found.values() if seed in of_arm.get(arm, {})]
        if len(losses) == len(found):
            means.setdefault(arm, {})[seed] = statistics.fmean(losses)
    return found | ({MEAN_OF_KINDS: means} if means else {})


def compare_held_out(losses: LossesByKind, section: ShuffleSection) -> tuple[HeldOutRow, ...]:
    """Returns a row for each kind and arm, with verdicts that are corrected for the number of all comparisons."""
    rows = []
    for kind, of_arm in losses.items():
        reference = of_arm.get(section.reference, {})
        for arm, of_seed in of_arm.items():
            difference = None
            if arm != section.reference:
                difference = difference_from(reference, of_seed, float, significance=section.significance)
            spread = Spread.of(list(of_seed.values()))
            rows.append(
                HeldOutRow(kind=kind, arm=arm, losses=of_seed, loss=spread, difference=difference, verdict=None)
            )
    return tuple(with_verdicts(rows, lambda _: section.effect, significance=section.significance))


def held_out_table(rows: Sequence[HeldOutRow], section: ShuffleSection) -> list[RenderableType]:
    """Returns the held-out losses; nothing before a run was evaluated."""
    if not rows:
        return []
    compared = sum(row.verdict is not None for row in rows)
    columns = [
        Column("held-out text", "kind"),
        Column("arm"),
        Column("seeds", lambda row: len(row.losses)),
        Column("loss, nats/token", "loss", ".4f"),
        Column("difference", "difference.mean", "+.4f"),
        Column(confidence_text(section.significance), "difference.interval", "+.4f"),
        Column(f"of {compared} (Holm)", "verdict", missing=""),
    ]
    title = (
        f"Loss on held-out text; difference from {section.reference}, seed by seed; differences below "
        f"{section.effect:g} do not matter"
    )
    return [table_of(rows, columns, title=title)]


_GROUP = 0.7
"""Width of the arms of a kind, of the distance between two kinds."""


def draw_held_out(axes: Any, rows: Sequence[HeldOutRow], colours: Mapping[str, str], section: ShuffleSection) -> None:
    """Draws the difference of each arm from the reference by kind, with its interval, and a point for each seed."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows if row.arm != section.reference))
    reference = {row.kind: row.losses for row in rows if row.arm == section.reference}
    axes.axhspan(-section.effect, section.effect, color=INK, alpha=0.08, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.7)
    for row in rows:
        if row.difference is None:
            continue
        place = kinds.index(row.kind) + _GROUP * ((arms.index(row.arm) + 0.5) / len(arms) - 0.5)
        low, high = row.difference.low, row.difference.high
        if low is not None and high is not None:
            axes.plot([place, place], [low, high], color=colours[row.arm], linewidth=5.0, alpha=0.45)
        single = [loss - reference[row.kind][seed] for seed, loss in row.losses.items() if seed in reference[row.kind]]
        axes.plot([place] * len(single), single, "o", color=INK, markersize=3.0)
        label = arm_label(row.arm) if row.kind == kinds[0] else None
        axes.plot([place], [row.difference.mean], "_", color=colours[row.arm], markersize=14, mew=2.5, label=label)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel(f"held-out loss - {arm_label(section.reference)}'s (nats/token)")
    axes.legend(frameon=False)
    write_title(axes, "Held-out loss by kind of text")


def caption_of_held_out(section: ShuffleSection) -> str:
    """Returns what the marks of `draw_held_out` mean."""
    return (
        f"Held-out loss: mean of the differences between runs of equal seeds, with its "
        f"{confidence_text(section.significance)}; dots: single seeds; grey: differences below {section.effect:g}, "
        "which do not matter."
    )
