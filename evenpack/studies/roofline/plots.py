"""A step as stacked bars: at the peaks, with all fusions, and as it is."""

from pathlib import Path

import numpy as np

from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.provenance import COMPUTED, provenance_line
from evenpack.studies.roofline.study import Roofline
from evenpack.studies.roofline.tables import verdict

_LAUNCHES = "#9aa5b1"
_LEAST_LABELLED = 0.045
"""Smallest part of the longest bar that has room for its milliseconds."""


def plot_roofline(found: Roofline, path: Path) -> None:
    """Draws milliseconds of each part. Raises: ConfigError without matplotlib."""
    bars = (
        ("floor: all fused, at the peaks", [row.floor_seconds for row in found.parts] + [0.0]),
        ("estimate, all fused", [row.fused_seconds for row in found.parts] + [found.fused_launches_seconds]),
        ("estimate, as it is", [row.expected_seconds for row in found.parts] + [found.launches_seconds]),
    )
    names = [*(row.part for row in found.parts), "launches"]
    colours = [*COLOURS[: len(found.parts)], _LAUNCHES]
    heights = 1e3 * np.array([seconds for _, seconds in bars])
    longest = heights.sum(axis=1).max()
    places = np.arange(len(bars))
    with figure_as_png(path, width=11.0, height=3.6) as figure:
        axes = figure.subplots()
        left = np.zeros(len(bars))
        for name, values, colour in zip(names, heights.T, colours, strict=True):
            axes.barh(places, values, left=left, color=colour, label=name, height=0.62)
            for place, start, value in zip(places, left, values, strict=True):
                if value > _LEAST_LABELLED * longest:
                    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                    axes.text(start + value / 2, place, shown, ha="center", va="center", color="white", fontsize=8.5)
            left += values
        for place, total in zip(places, left, strict=True):
            rate = found.tokens_per_step / total * 1e3
            over_the_goal = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            label = f"{rate:,.0f} tokens/s"
            axes.text(total + 0.01 * longest, place, label, va="center", color=INK, fontsize=9, bbox=over_the_goal)
        if found.goal is not None:
            goal = 1e3 * found.tokens_per_step / found.goal
            axes.axvline(goal, color=INK, linestyle="--", linewidth=1.2)
            axes.text(goal, len(bars) - 0.45, f"goal {found.goal:,.0f}", ha="center", va="bottom", fontsize=9)
        axes.set_yticks(places, [name for name, _ in bars])
        axes.set_xlim(0.0, 1.2 * longest)
        axes.set_xlabel("ms per step of one device")
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        write_title(axes, f"{found.model} on {found.device}: ESTIMATE, nothing is measured\n")
        axes.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
        data = "as assumed" if found.assumptions else "prepared"
        write_footer(figure, [verdict(found), provenance_line(found.run, data=data, device=COMPUTED)])
