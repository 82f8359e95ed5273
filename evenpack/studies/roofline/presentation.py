"""A roofline as tables, and a step as stacked bars: at the peaks, with all fusions, and as it is."""

from pathlib import Path

import numpy as np
from rich.console import RenderableType

from evenpack import console
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.provenance import COMPUTED, provenance_line
from evenpack.studies.roofline.study import Roofline

_PARTS = (
    Column("part"),
    Column("TFLOP", lambda row: row.flops / 1e12, ".4g"),
    Column("GB", lambda row: row.bytes / 1e9, ".4g"),
    Column("kernels", form=","),
    Column("floor, ms", "floor_seconds", ".4g", scale=1e3),
    Column("estimate, ms", "expected_seconds", ".4g", scale=1e3),
    Column("all fused, ms", "fused_seconds", ".4g", scale=1e3),
)
_MOST_NAMED = 3
"""Parts that are named as those that hold a goal back."""


def roofline_tables(found: Roofline) -> list[RenderableType]:
    """Returns tables of the parts and the fusions, between what the figures are of and what they say of the goal."""
    head = (
        f"ESTIMATE, not measured: {found.run}, {found.model}, bfloat16, on one of {found.devices} x {found.device}; "
        f"{found.micro_batches} x {found.slots_per_micro_batch:,} slots per step"
    )
    return [
        console.text(head),
        table_of(found.rows, _PARTS, title="Parts of a step"),
        console.table(_rates(found), title="Real tokens/s of one device"),
        console.text(verdict(found)),
        *(console.text(f"Assumed: {line}") for line in found.assumptions),
    ]


def verdict(found: Roofline) -> str:
    """Returns what holds the step back, and whether the goal is within the estimate."""
    most = ", ".join(f"{name} ({1e3 * seconds:.3g} ms)" for name, seconds in found.excesses[:_MOST_NAMED])
    above = f"Most above the floor: {most}."
    if found.is_host_bound:
        above += " The host issues kernels more slowly than the device runs them."
    if found.goal is None:
        return above
    wanted = 1e3 * found.tokens_per_step / found.goal
    goal = f"The goal of {found.goal:,.0f} tokens/s allows {wanted:.4g} ms a step: "
    if found.is_reached:
        return f"{goal}the estimate is within it. {above}"
    if found.reached_with is not None:
        return f"{goal}the estimate is within it with all fusions up to '{found.reached_with}'. {above}"
    if found.goal > found.floor_tokens_per_second:
        return f"{goal}that is less than the floor, so it cannot be reached. {above}"
    return f"{goal}the estimate is above it with all fusions. {above}"


def _rates(found: Roofline) -> list[dict[str, str]]:
    rows = [
        {
            "step": "as it is",
            "tokens/s": f"{found.expected_tokens_per_second:,.0f}",
            "saves alone, ms": "-",
            "kind": f"estimate, MFU {console.percent(found.expected_mfu)}",
        }
    ]
    rows += [
        {
            "step": f"+ {row.fusion}",
            "tokens/s": f"{row.tokens_per_second:,.0f}",
            "saves alone, ms": f"{1e3 * row.saved_seconds:.4g}",
            "kind": "estimate",
        }
        for row in found.fusions
    ]
    floor = {"step": "all fused, at the peaks", "tokens/s": f"{found.floor_tokens_per_second:,.0f}"}
    return [*rows, floor | {"saves alone, ms": "-", "kind": "floor"}]


_LAUNCHES = "#9aa5b1"
_LEAST_LABELLED = 0.045
"""Smallest part of the longest bar that has room for its milliseconds."""


def plot_roofline(found: Roofline, path: Path) -> None:
    """Draws milliseconds of each part. Raises: ConfigError without matplotlib."""
    bars = (
        ("floor: all fused, at the peaks", [row.floor_seconds for row in found.rows]),
        ("estimate, all fused", [row.fused_seconds for row in found.rows]),
        ("estimate, as it is", [row.expected_seconds for row in found.rows]),
    )
    names = [row.part for row in found.rows]
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
