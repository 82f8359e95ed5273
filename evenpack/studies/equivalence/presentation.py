"""An equivalence study as tables and as a figure."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from evenpack import console
from evenpack.studies.columns import Column, table_of
from evenpack.studies.equivalence.compare import ArmRow, Comparison, CurvesOfArms, TaskComparison
from evenpack.studies.equivalence.config import EquivalenceConfig, EquivalenceSection
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, line_style, write_footer, write_title
from evenpack.studies.runs.arms import arm_label, confidence_text, draw_runs, seeds_text
from evenpack.studies.statistics.paired import PairedDifference

_LEARNED = (
    Column("arm"),
    Column("seeds", lambda row: len(row.seeds)),
    Column("loss", form=".4f"),
    Column("accuracy", form=".4f"),
    Column("next sentence", "next_sentence_accuracy", ".4f"),
    Column("training loss", "training_loss", ".4f"),
    Column("difference", "difference.mean", "+.4f"),
    Column("interval", "difference.interval", "+.4f"),
    Column("verdict", missing=""),
)
_SPEED = (
    Column("arm"),
    Column("sequences/step", lambda row: round(row.sequences_per_step, 1)),
    Column("samples to target", "speed.samples_to_target", ",.0f"),
    Column("samples, x", "speed.samples_ratio"),
    Column("p", "speed.slots_ratio"),
    Column("bytes/sequence to device", "host_to_device_bytes_per_sequence", ",.0f"),
)
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
    """Returns the results of each arm and the samples it took; only a note before a run has finished."""
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
            f"To {section.measure} {comparison.target:.4g}, relative to {section.reference}: p is the ratio of slots "
            "per sequence"
        )
        shown.append(table_of([row for row in comparison.rows if row.speed is not None], _SPEED, title=title))
    return shown + [console.text(line) for line in _without_verdict(comparison, section)]


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


_POINTS = 200
"""Points of a curve, between the first evaluation that all seeds have and the last."""
_NAME_COLUMNS = 18
"""Columns of an arm's name in the panel of differences."""
_PANEL_INCHES = 5.6


def plot_equivalence(
    curves: CurvesOfArms,
    comparison: Comparison,
    study: EquivalenceConfig,
    path: Path,
    *,
    origin: str,
) -> None:
    """Draws the measure against samples, and the differences with the margin.

    An arm has the same colour in all panels, and controls are dashed and named as such. Curves have a band over seeds.
    `origin`: data, commits and devices of the runs.

    Raises: ConfigError without matplotlib.
    """
    compared = [row for row in comparison.rows if row.difference is not None]
    height = max(4.6, 1.6 + 0.34 * len(comparison.rows))
    section = study.equivalence
    styles = {arm: line_style(index) for index, arm in enumerate(curves)}
    for arm in [*curves][: len(COLOURS)]:  # from there on others are dashed too
        styles[arm] |= {"linestyle": (0, (5, 2))} if arm in section.controls else {}
    with figure_as_png(path, width=2 * _PANEL_INCHES, height=height) as figure:
        axes = figure.subplots(1, 2, width_ratios=[1.0, 1.1])
        _draw_curves(axes[0], curves, comparison, section, styles)
        _draw_verdicts(axes[1], compared, section, styles)
        handles, arms = axes[0].get_legend_handles_labels()
        figure.legend(handles, arms, loc="outside upper left", ncols=3, frameon=False)
        write_footer(figure, [origin, _caption(curves, comparison, study)])


def _caption(curves: CurvesOfArms, comparison: Comparison, study: EquivalenceConfig) -> str:
    section = study.equivalence
    target = f" Dotted: {section.measure} to which samples are counted." if comparison.target is not None else ""
    return (
        f"Phase: {study.last_phase}; {seeds_text(curves.values())}. Lines: mean over seeds, where all of them "
        f"were evaluated; bands: least to greatest.{target} Differences: mean over pairs of one seed, with "
        f"{confidence_text(section.significance)}s; without an interval there was one pair."
    )


def _draw_curves(
    axes: Any,
    curves: CurvesOfArms,
    comparison: Comparison,
    section: EquivalenceSection,
    styles: Mapping[str, Mapping[str, Any]],
) -> None:
    from matplotlib.ticker import EngFormatter

    for arm, of_seed in curves.items():
        runs = [
            (np.array(curve.samples, dtype=np.float64), curve.values(section.measure)) for curve in of_seed.values()
        ]
        if not runs:
            continue
        # Where all of the arm's runs have been evaluated.
        start, end = max(float(samples[0]) for samples, _ in runs), min(float(samples[-1]) for samples, _ in runs)
        grid = np.linspace(start, end, _POINTS) if end > start else np.array([start])
        lines = [np.interp(grid, samples, values) for samples, values in runs]
        style = {**styles[arm], "label": _name(arm, section), "marker": "o" if len(grid) == 1 else None}
        draw_runs(axes, grid, lines, linewidth=1.8, **style)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k
    write_title(axes, "Against samples")
    axes.set_xlabel("samples seen (sequences)")
    axes.set_ylabel("held-out loss (nats/token)" if section.measure == "loss" else "held-out accuracy")
    if comparison.target is not None:
        axes.axhline(comparison.target, color=INK, linewidth=0.7, linestyle=":")


def _name(arm: str, section: EquivalenceSection) -> str:
    return f"{arm_label(arm)} (control)" if arm in section.controls else arm_label(arm)


def _draw_verdicts(
    axes: Any, rows: Sequence[ArmRow], section: EquivalenceSection, styles: Mapping[str, Mapping[str, Any]]
) -> None:
    axes.axvspan(-section.margin, section.margin, color="#e4e7eb", zorder=0)
    marks: list[_Mark] = [
        (_name(row.arm, section), row.difference, styles[row.arm]["color"], row.verdict or "undecided")
        for row in rows
        if row.difference is not None
    ]
    _draw_differences(axes, marks)
    unit = " (nats/token)" if section.measure == "loss" else ""
    axes.set_xlabel(f"{section.measure} minus {section.reference}'s{unit}; grey: margin ± {section.margin:g}")
    held = [row.arm for row in rows if row.verdict in {"equivalent", "no verdict"}]
    write_title(axes, f"{len(held)} of {len(rows)} arms within the margin of {section.reference}")


_Mark = tuple[str, PairedDifference, str, str]
"""The difference of one arm in a panel: the arm as it is written, its difference, its colour, and a word."""


def _draw_differences(axes: Any, marks: Sequence[_Mark]) -> None:
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for place, (_, difference, colour, word) in enumerate(reversed(marks)):
        if difference.low is not None and difference.high is not None:
            axes.plot([difference.low, difference.high], [place, place], color=colour, linewidth=2.2)
        axes.plot([difference.mean], [place], "o", color=colour, markersize=6)
        at = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
        axes.annotate(word, (difference.mean, place), color=colour, **at)
    axes.set_yticks(range(len(marks)), [textwrap.fill(arm, _NAME_COLUMNS) for arm, *_ in reversed(marks)])
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(-0.6, len(marks) - 0.2)
