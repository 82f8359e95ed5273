"""Draws the certified table: the packs above the proven bound, and the time of packing."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.plotting import COLOURS, figure_as_png, write_footer, write_title

SERIES = {"longest_pack_first": COLOURS[1], "cutting_stock": COLOURS[0]}
BAR = 0.38


def plot_certified(results: Path, out: Path, *, measured: str) -> None:
    """Draws two bars for each case of `benchmarks/packing.py --json`: packs above the best proven bound, in percent.

    The axis is logarithmic; a case that meets its bound has no bar.

    Args:
        measured: commit and device, which the results do not hold.
    """
    rows = json.loads(results.read_text(encoding="utf-8"))
    cases = list(dict.fromkeys((row["histogram"], row["depth"]) for row in rows))
    bounds = {case: max(row["lower_bound"] for row in rows if _case(row) == case) for case in cases}
    over = {(_case(row), row["algorithm"]): 100 * (row["packs"] / bounds[_case(row)] - 1) for row in rows}
    floor = min((value for value in over.values() if value > 0), default=1.0) / 3
    with figure_as_png(out, width=9.0, height=0.62 * len(cases) + 1.4) as figure:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        for row in rows:
            position = cases.index(_case(row)) + (list(SERIES).index(row["algorithm"]) - 0.5) * BAR
            _bar(axes, position, row, over[_case(row), row["algorithm"]], floor)
        axes.set_xlim(floor, 30 * max(floor, *over.values()))
        axes.set_ylim(len(cases) - 0.4, -0.6)
        axes.set_yticks(range(len(cases)), [_label(*case) for case in cases])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.minorticks_off()
        axes.set_xlabel("packs above the proven bound (%, logarithmic)")
        write_title(axes, _finding(over))
        repeats = max(row.get("repeats", 1) for row in rows)
        origin = f"benchmarks/packing.py: data the published histograms; {measured}. CPU seconds: median of {repeats}."
        write_footer(figure, [origin])


def _case(row: dict[str, Any]) -> tuple[str, int | None]:
    return row["histogram"], row["depth"]


def _label(histogram: str, depth: int | None) -> str:
    return f"{histogram}, " + ("any depth" if depth is None else f"depth {depth}")


def _bar(axes: Any, position: float, row: dict[str, Any], over: float, floor: float) -> None:
    colour = SERIES[row["algorithm"]]
    if over > 0:
        axes.barh(position, over - floor, left=floor, height=BAR * 0.9, color=colour)
    excess = f"{_digits(over)} %" if over > 0 else "0 %"
    name = row["algorithm"] + ": " if position < BAR else ""  # the first pair names the colours
    axes.annotate(
        f"{name}{excess}, {row['cpu_seconds']:.2g} CPU s",
        (max(over, floor), position),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=colour,
    )


def _finding(over: dict[tuple[tuple[str, int | None], str], float]) -> str:
    worst = max(value for (_, algorithm), value in over.items() if algorithm == "cutting_stock")
    return f"cutting_stock ends at most {_digits(worst)} % above the proven bound"


def _digits(percent: float) -> str:
    """Returns two significant digits without an exponent."""
    return np.format_float_positional(percent, precision=2, fractional=False, trim="-")
