"""Figures of lengths and of the efficiency of packs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import LengthStatistics, length_ranges
from evenpack.studies.packing.packing import PackingRow
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, label_ends, write_title

_MAX_BARS = 64


def plot_packing(
    histogram: LengthHistogram,
    statistics: LengthStatistics,
    rows: Sequence[PackingRow],
    path: Path,
    *,
    pack_length: int,
    sweep: Sequence[PackingRow] = (),
) -> None:
    """Draws the lengths, and the efficiency by depth and algorithm; if given, by depth and pack length (`sweep`).

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=20.0 if sweep else 11.0, height=4.2) as figure:
        ratios = {"width_ratios": [1.15, 1.0, 1.0][: 3 if sweep else 2], "wspace": 0.85 if sweep else 0.28}
        panels = figure.subplots(1, 3 if sweep else 2, gridspec_kw=ratios)
        _draw_lengths(panels[0], histogram, statistics, pack_length)
        _draw_efficiencies(panels[1], rows)
        if sweep:
            _draw_pack_lengths(panels[2], sweep)


def plot_depth_curves(curves: Mapping[str, Sequence[PackingRow]], path: Path) -> None:
    """Draws the speed-up over padding by depth, a curve for each list of lengths.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=8.0, height=4.5) as figure:
        axes = figure.add_subplot()
        _draw_curves(axes, {name: [(row.depth_limit, row.speed_up) for row in rows] for name, rows in curves.items()})
        axes.set_ylabel("speed-up over padding (slots of padding / slots of packs)")
        best = max((row.speed_up, name) for name, rows in curves.items() for row in rows)
        write_title(axes, f"Padding {best[1]} would take {best[0]:.2f} times the slots of its packs")


def _draw_lengths(axes: Any, histogram: LengthHistogram, statistics: LengthStatistics, pack_length: int) -> None:
    ranges = length_ranges(histogram, bars=_MAX_BARS)
    lefts = [bar.shortest - 0.5 for bar in ranges]
    widths = [bar.longest - bar.shortest + 1 for bar in ranges]
    shares = [100 * bar.sequences / statistics.sequences for bar in ranges]
    axes.bar(lefts, shares, width=widths, align="edge", color=COLOURS[0], alpha=0.85, linewidth=0.4, edgecolor="white")
    axes.axvline(statistics.median, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    width = max(pack_length, histogram.longest)
    at_right = statistics.median > width / 2
    axes.annotate(
        f"median {statistics.median:,}",
        (statistics.median, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if at_right else 5, -4),
        textcoords="offset points",
        ha="right" if at_right else "left",
        va="top",
    )
    axes.set_xlim(0, width + 0.5)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("sequences (%)")
    write_title(axes, f"Padding to {pack_length:,} would waste {100 * statistics.padding_share:.1f} % of all slots")


def _draw_efficiencies(axes: Any, rows: Sequence[PackingRow]) -> None:
    alone = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == "none"]
    curves = {}
    for algorithm in dict.fromkeys(row.algorithm for row in rows if row.algorithm != "none"):
        points = [(row.depth_limit, 100 * row.efficiency) for row in rows if row.algorithm == algorithm]
        # A single depth is a point: a line from no packing would suggest depths that were not tried.
        curves[algorithm.replace("_", " ")] = [*alone, *points] if len(points) > 1 else points
    _draw_curves(axes, curves, unit=" %")
    axes.set_ylabel("packing efficiency (% of slots)")
    axes.set_ylim(top=101)
    best = max(rows, key=lambda row: row.efficiency)
    write_title(axes, f"Packs of up to {best.depth} sequences are {100 * best.efficiency:.2f} % full")


def _draw_pack_lengths(axes: Any, sweep: Sequence[PackingRow]) -> None:
    curves = {
        f"{length:,} slots": [(row.depth_limit, 100 * row.efficiency) for row in sweep if row.pack_length == length]
        for length in dict.fromkeys(row.pack_length for row in sweep)
    }
    _draw_curves(axes, curves, unit=" %")
    axes.set_ylabel("packing efficiency (% of slots)")
    axes.set_ylim(top=101)
    best = max(sweep, key=lambda row: row.efficiency)
    write_title(axes, f"By pack length: {best.pack_length:,} slots get {100 * best.efficiency:.2f} % full")


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[int | None, float]]], *, unit: str = "") -> None:
    """Draws a line of (limit of depth, value) for each name, which is written at its end."""
    limits = {limit for points in curves.values() for limit, _ in points}
    ordered = [*sorted(limit for limit in limits if limit is not None), *([None] if None in limits else [])]
    places = {limit: index for index, limit in enumerate(ordered)}
    ends = []
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        steps, values = [places[limit] for limit, _ in points], [value for _, value in points]
        width = max(1.4, 2.9 - 0.5 * index)  # lines below stay visible
        axes.plot(steps, values, color=colour, linewidth=width, marker="o", markersize=2 * width)
        ends.append((f"{name} {values[-1]:.2f}{unit}", values[-1], colour))
    axes.set_xticks(range(len(ordered)), ["no limit" if limit is None else str(limit) for limit in ordered])
    axes.set_xlabel("most sequences a pack may hold")
    axes.set_xlim(-0.3, len(ordered) - 0.7)
    label_ends(axes, ends)
