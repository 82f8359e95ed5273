"""Throughput as a figure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenpack.studies.plotting import COLOURS, figure_as_png, write_footer, write_title
from evenpack.studies.provenance import provenance_line
from evenpack.studies.throughput.measure import Quartiles, clear_winner
from evenpack.studies.throughput.study import DepthRow, LayoutRow, ThroughputStudy

_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce and clipping",
    "update": "optimizer",
}
"""Phases of a step, with their names for people."""
_PANEL_INCHES = 4.2
_BAR_INCHES = 0.95
"""Width of a bar in inches: the longest word of a layout's name fits without overlap."""
_GAP_INCHES = 1.1
"""Inches left of each panel, for its axis."""


def plot_throughput(study: ThroughputStudy, path: Path) -> None:
    """Draws the phases of a step in each layout, sequences/s, and, if measured, speed-ups by packing depth.

    Raises: ConfigError without matplotlib.
    """
    widths = [max(_PANEL_INCHES, _BAR_INCHES * len(study.layouts))] * 2 + [_PANEL_INCHES] * bool(study.depths)
    width = sum(widths) + _GAP_INCHES * len(widths)
    grid = {"width_ratios": widths, "left": _GAP_INCHES / width, "right": 1.0}
    grid["wspace"] = _GAP_INCHES * len(widths) / sum(widths)  # in widths of the average panel
    with figure_as_png(path, width=width, height=4.4) as figure:
        axes = figure.subplots(1, len(widths), gridspec_kw=grid)
        _draw_phases(axes[0], study.layouts)
        _draw_rates(axes[1], study.layouts)
        if study.depths:
            _draw_depths(axes[2], study.depths)
        write_footer(figure, _footer(study))


def _footer(study: ThroughputStudy) -> list[str]:
    origin = study.measured_on
    return [
        provenance_line(
            study.run,
            data=study.data,
            evenpack=origin.evenpack,
            commits=[origin.commit],
            device=f"{study.ranks} x {origin.device}",
        ),
        f"{origin.model}, {origin.layers} layers of {origin.hidden_size}, {origin.precision}, attention "
        f"{origin.attention}; {study.rows_per_step} rows of {study.pack_length} slots per step. Medians of "
        f"{study.options.rounds} steps; bars: the middle half; phases: of rank 0.",
    ]


def _draw_phases(axes: Any, rows: Sequence[LayoutRow]) -> None:
    names = [_in_lines(row.layout) for row in rows]
    floors = [0.0] * len(rows)
    for (phase, label), colour in zip(_PHASES.items(), COLOURS, strict=False):
        values = [float(getattr(row, f"{phase}_seconds")) for row in rows]
        axes.bar(names, values, bottom=floors, color=colour, width=0.6, label=label)
        floors = [floor + value for floor, value in zip(floors, values, strict=True)]
    axes.set_ylabel("seconds per step")
    axes.set_ylim(top=1.25 * max(floors))
    axes.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)
    write_title(axes, "Where a step's time goes")


def _draw_rates(axes: Any, rows: Sequence[LayoutRow]) -> None:
    names = [_in_lines(row.layout) for row in rows]
    spreads = [row.sequences_per_second for row in rows]
    medians = [spread.median for spread in spreads]
    axes.bar(names, medians, color=COLOURS[0], alpha=0.85, width=0.6)
    axes.errorbar(names, medians, yerr=_reach(spreads), fmt="none", ecolor="#1f2933", elinewidth=1.2, capsize=4)
    for index, median in enumerate(medians):
        axes.annotate(
            _three_digits(median), (index, median / 2), ha="center", va="center", color="white", fontweight="bold"
        )
    axes.set_ylabel("sequences/s")
    winner = clear_winner(spreads)
    write_title(axes, "Throughput of the layouts" if winner is None else f"Fastest: {rows[winner].layout}")


def _draw_depths(axes: Any, rows: Sequence[DepthRow]) -> None:
    places = range(len(rows))
    realised = [row.realised_speed_up for row in rows]
    lines = (
        ("packing factor (computed)", [row.packing_factor for row in rows], "#9aa5b1", ":"),
        ("predicted: factor / (1 + overhead)", [row.predicted_speed_up for row in rows], COLOURS[1], "--"),
        ("realised (measured)", [spread.median for spread in realised], COLOURS[0], "-"),
    )
    for label, values, colour, style in lines:
        axes.plot(places, values, style, color=colour, marker="o", markersize=5, linewidth=2.0, label=label)
    medians = [spread.median for spread in realised]
    axes.errorbar(places, medians, yerr=_reach(realised), fmt="none", ecolor=COLOURS[0], elinewidth=1.4, capsize=4)
    axes.set_xticks(places, ["max" if row.depth is None else str(row.depth) for row in rows])
    axes.set_xlabel("most sequences a pack may hold")
    axes.set_ylabel("speed-up over padding")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    write_title(axes, _depths_title(rows, clear_winner(realised)))


def _depths_title(rows: Sequence[DepthRow], winner: int | None) -> str:
    if winner is None:
        return "Speed-up by packing depth"
    depth = rows[winner].depth
    packs = "full packs" if depth is None else f"packs of {depth} at most"
    return f"Fastest: {packs}, {rows[winner].realised_speed_up.median:.2f} x padding"


def _three_digits(value: float) -> str:
    """Returns 15.0 for 15.01 and 413 for 413.2."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _in_lines(layout: str) -> str:
    """Returns `unpadded/sorted_serpentine` with one word per line, for the label of a bar."""
    return layout.replace("/", "/\n").replace("_", "_\n")


def _reach(spreads: Sequence[Quartiles]) -> list[list[float]]:
    """Returns the distances below and above the medians."""
    return [
        [spread.median - spread.quartile_1 for spread in spreads],
        [spread.quartile_3 - spread.median for spread in spreads],
    ]
