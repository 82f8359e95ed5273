"""Figures 7 and 8 of PackedBERT for any lengths: the residual of least squares by length, and the search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.plotting import COLOURS, INK, figure_as_png, label_ends, write_footer, write_title
from evenpack.studies.residuals.search import ResidualRow

_LEAST_PERCENT = 1e-4
"""Least percentage on the logarithmic axis, where full packs would be infinitely low."""
_LINEAR_UP_TO = 10
"""Limit of the linear part in sequences; rounding moves a residual by a few, the largest residuals are thousands."""


def plot_residuals(rows: Sequence[ResidualRow], path: Path, *, footer: Sequence[str]) -> None:
    """Draws the residual of the first setting and of the fullest packs, by length; then padding over all settings.

    `footer`: what the figure is of.

    Raises: ConfigError without matplotlib.
    """
    best = max(rows, key=lambda row: row.efficiency)
    shown = [rows[0]] if best is rows[0] else [rows[0], best]
    panels = len(shown) + (len(rows) > 1)
    with figure_as_png(path, width=6.6 * panels, height=4.6) as figure:
        axes = figure.subplots(1, panels, squeeze=False, gridspec_kw={"wspace": 0.32})[0]
        limits = _limits(shown)
        for panel, row in zip(axes, shown, strict=False):
            _draw_residual(panel, row, limits)
        if len(rows) > 1:
            _draw_search(axes[-1], rows)
        caption = (
            f"Residual: sequences minus slots of a length; the axis is linear between -{_LINEAR_UP_TO} and "
            f"{_LINEAR_UP_TO}, logarithmic beyond."
        )
        write_footer(figure, [*footer, caption])


def _limits(rows: Sequence[ResidualRow]) -> tuple[float, float]:
    values = np.concatenate([row.whole_residual for row in rows])
    return 3.0 * min(float(values.min()), -1.0), 3.0 * max(float(values.max()), 1.0)


def _draw_residual(axes: Any, row: ResidualRow, limits: tuple[float, float]) -> None:
    lengths = np.arange(1, len(row.residual) + 1)
    axes.plot(
        lengths,
        row.whole_residual,
        color=COLOURS[1],
        linestyle="none",
        marker="o",
        markersize=2.6,
        alpha=0.6,
        markeredgewidth=0,
        label="rounded to whole packs",
    )
    axes.plot(lengths, row.residual, color=COLOURS[0], linewidth=1.4, label="as solved")
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_yscale("symlog", linthresh=_LINEAR_UP_TO)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(*limits)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("residual (sequences)\nslots without a sequence  |  sequences without a slot", fontsize=9)
    axes.legend(frameon=False, loc="upper center")
    write_title(
        axes,
        f"{row.setting.label[0].upper()}{row.setting.label[1:]}: {row.left_over:,} sequences without a slot,\n"
        f"{row.missing:,} slots without a sequence, {100 * row.efficiency:.4f} % full",
    )


def _draw_search(axes: Any, rows: Sequence[ResidualRow]) -> None:
    """Draws padding by the longest length of a weight, a line for each weight."""
    from matplotlib.ticker import LogLocator

    limits = sorted({row.setting.weight_up_to for row in rows})
    ends = []
    for index, weight in enumerate(dict.fromkeys(row.setting.weight for row in rows)):
        points = [(row.setting.weight_up_to, _percent_padding(row)) for row in rows if row.setting.weight == weight]
        if weight == 1:
            points = [(limit, points[0][1]) for limit in limits]
        at, values = zip(*sorted(points), strict=True)
        axes.plot(at, values, color=COLOURS[index % len(COLOURS)], marker="o", linewidth=1.8)
        ends.append((f"weight {weight:g}  {values[-1]:.3f} %", values[-1], COLOURS[index % len(COLOURS)]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(limits, [f"{limit:,}" for limit in limits])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
    axes.set_xlabel("longest length with the weight (tokens, logarithmic)")
    axes.set_ylabel("padding (% of slots, logarithmic)")
    label_ends(axes, ends)
    write_title(axes, title_of_search(rows))


def title_of_search(rows: Sequence[ResidualRow]) -> str:
    """Returns the setting with the least padding, unless another one has as few packs."""
    best = min(rows, key=lambda row: row.packs)
    if [row.packs for row in rows].count(best.packs) > 1:
        return "Padding by weight"
    return f"Least padding: {best.setting.label}, {_percent_padding(best):.3f} %"


def _percent_padding(row: ResidualRow) -> float:
    return max(100 * (1 - row.efficiency), _LEAST_PERCENT)
