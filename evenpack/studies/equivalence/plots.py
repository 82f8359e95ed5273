"""An equivalence study as a figure."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.studies.equivalence.compare import ArmRow, Comparison, CurvesOfArms
from evenpack.studies.equivalence.config import EquivalenceConfig, EquivalenceSection
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_title

_DASHES = ("-", "--", ":")
"""Colours are used again with the next of them."""
_POINTS = 200
"""Of a curve, between the first evaluation that all seeds have and the last."""
_VERDICT_COLOURS = {"equivalent": COLOURS[2], "worse": COLOURS[4], "better": COLOURS[0], "undecided": "#9aa5b1"}
_NAME_COLUMNS = 18
"""Of an arm's name beside its difference."""
_HOUR = 3600.0


def plot_equivalence(curves: CurvesOfArms, comparison: Comparison, study: EquivalenceConfig, path: Path) -> None:
    """The measure against samples and against time, a band over seeds each, and the differences beside the margin.

    Raises: ConfigError without matplotlib.
    """
    section = study.equivalence
    compared = [row for row in comparison.rows if row.difference is not None]
    height = max(4.6, 1.6 + 0.34 * len(comparison.rows))
    with figure_as_png(path, width=17.0, height=height) as figure:
        axes = figure.subplots(1, 3, gridspec_kw={"wspace": 0.38, "width_ratios": [1.0, 1.0, 1.1]})
        longest = max(curve.seconds[-1] for of_seed in curves.values() for curve in of_seed.values())
        unit, seconds = ("hours", _HOUR) if longest >= _HOUR else ("minutes", 60.0)
        for index, (arm, of_seed) in enumerate(curves.items()):
            runs = list(of_seed.values())
            if runs:
                style = {"color": COLOURS[index % len(COLOURS)], "linestyle": _DASHES[index // len(COLOURS) % 3]}
                values = [np.array(curve.values(section.measure)) for curve in runs]
                _draw(axes[0], arm, [np.array(curve.samples, dtype=np.float64) for curve in runs], values, style)
                _draw(axes[1], arm, [np.array(curve.seconds) / seconds for curve in runs], values, style)
        label = "held-out loss (nats/target)" if section.measure == "loss" else "held-out accuracy"
        for one, name in ((axes[0], "samples seen (sequences)"), (axes[1], f"time in training steps ({unit})")):
            one.set_xlabel(name)
            one.set_ylabel(label)
            if comparison.target is not None:
                one.axhline(comparison.target, color=INK, linewidth=0.7, linestyle=":")
        axes[0].legend(frameon=False, fontsize=8.5)
        write_title(axes[0], "Against samples")
        write_title(axes[1], "Against time")
        _draw_differences(axes[2], compared, section)
        seeds = sorted({seed for of_seed in curves.values() for seed in of_seed})
        figure.text(
            0.125,
            -0.04,
            f"{study.study.name}, phase {study.last_phase}, seeds {', '.join(map(str, seeds))}. Lines: mean over "
            f"seeds; bands: least to greatest. Dotted: {section.measure} to which times are taken.",
            fontsize=8.5,
        )


def _draw(
    axes: Any,
    arm: str,
    places: Sequence[Float64[np.ndarray, " points"]],
    values: Sequence[Float64[np.ndarray, " points"]],
    style: Mapping[str, Any],
) -> None:
    """The runs of an arm where all of them have been evaluated: their mean, and what lies between them."""
    start, end = max(float(one[0]) for one in places), min(float(one[-1]) for one in places)
    grid = np.linspace(start, end, _POINTS) if end > start else np.array([start])
    lines = np.stack([np.interp(grid, *line) for line in zip(places, values, strict=True)])
    axes.plot(grid, lines.mean(axis=0), label=arm, linewidth=1.8, marker="o" if len(grid) == 1 else None, **style)
    if len(lines) > 1:
        axes.fill_between(grid, lines.min(axis=0), lines.max(axis=0), color=style["color"], alpha=0.15, linewidth=0)


def _draw_differences(axes: Any, rows: Sequence[ArmRow], section: EquivalenceSection) -> None:
    axes.axvspan(-section.margin, section.margin, color="#e4e7eb", zorder=0)
    axes.axvline(0.0, color=INK, linewidth=0.8)
    for place, row in enumerate(reversed(rows)):
        difference, colour = row.difference, _VERDICT_COLOURS[row.verdict or "undecided"]
        assert difference is not None, "rows without it are left out"
        if difference.low is not None and difference.high is not None:
            axes.plot([difference.low, difference.high], [place, place], color=colour, linewidth=2.2)
        axes.plot([difference.mean], [place], "o", color=colour, markersize=6)
        axes.annotate(
            row.verdict, (difference.mean, place), xytext=(0, 8), textcoords="offset points", ha="center", color=colour
        )
    axes.set_yticks(
        range(len(rows)), [textwrap.fill(row.arm.replace("_", " "), _NAME_COLUMNS) for row in reversed(rows)]
    )
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(-0.6, len(rows) - 0.2)
    axes.set_xlabel(f"{section.measure} minus {section.reference}'s; grey: the margin, ± {section.margin:g}")
    held = [row.arm for row in rows if row.verdict == "equivalent"]
    write_title(axes, f"{len(held)} of {len(rows)} arms equivalent to {section.reference}")
