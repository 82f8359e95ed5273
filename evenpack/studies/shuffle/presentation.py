"""A shuffle study as tables and a figure: the loss of each arm against the step, and its jumps at borders of blocks."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from rich.console import RenderableType

from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.runs.arms import arm_label, seeds_text
from evenpack.studies.shuffle.config import ShuffleSection, ShuffleStudyConfig
from evenpack.studies.shuffle.study import ArmOrder
from evenpack.studies.statistics.paired import Spread

_READING = (
    Column("order", "arm"),
    Column(
        "read from disk",
        lambda row: f"{row.reading.bytes_from_disk / max(row.reading.bytes_used, 1):.2f} x used",
    ),
    Column("MB/s", "reading.bytes_per_second", ".1f", scale=1e-6),
)
_JUMPS = (
    Column("arm"),
    Column("seeds"),
    Column("jump, nats/target", "jump.mean", "+.4f"),
    Column("deviation", "jump.deviation", ".4f"),
)


def order_tables(orders: Sequence[ArmOrder], section: ShuffleSection) -> list[RenderableType]:
    """Returns tables of the randomness of each order, and of its reading rate; none before a run has finished."""
    if not orders:
        return []
    quality = (
        Column("order", "arm"),
        Column("displacement", "quality.displacement", ".3f"),
        Column("pack-mates", "quality.pack_mates", ".2f", scale=float(section.stretches)),
        Column("step-mates", "quality.step_mates", ".2f", scale=float(section.stretches)),
        Column("sources of a window", "quality.window_distance", ".2%"),
    )
    return [
        table_of(
            orders,
            quality,
            title=(
                "Order of an epoch: mean distance from the position in the corpus (1/3: uniform); neighbours of one "
                f"{section.stretches}th of the corpus in a pack or step, relative to chance; greatest distance of a "
                "window's sources"
            ),
        ),
        table_of(
            [order for order in orders if order.reading is not None],
            _READING,
            title=f"Reading the first {section.steps_read} steps, of a file that is not cached, in this process",
        ),
    ]


def jump_table(
    jumps: Mapping[str, Mapping[int, float]], section: ShuffleSection, *, borders: Sequence[int]
) -> list[RenderableType]:
    """Returns the jumps of the loss at borders of blocks, in each arm at the same steps.

    Nothing without a finished run.
    """
    rows = [
        {"arm": arm, "seeds": len(of_seed), "jump": Spread.of(list(of_seed.values()))}
        for arm, of_seed in jumps.items()
        if of_seed
    ]
    if not rows:
        return []
    title = (
        f"Mean loss of the {section.steps_around_border} steps after a border of blocks minus the mean of as many "
        f"before it, at steps {', '.join(map(str, borders))}"
    )
    return [table_of(rows, _JUMPS, title=title)]


_SMOOTHED = 5
"""Steps of a running mean, in the figure only."""
_MOST_UPRIGHT = 7
"""Bars whose names have room side by side."""
_NAME_COLUMNS = 12
"""Columns of an arm's name below its bar."""

LossesOfArms = Mapping[str, Mapping[int, Float64[np.ndarray, " steps"]]]


def plot_shuffle(
    losses: LossesOfArms,
    jumps: Mapping[str, Mapping[int, float]],
    borders: Sequence[int],
    study: ShuffleStudyConfig,
    path: Path,
    *,
    origin: str,
) -> None:
    """Draws the study; `origin`: data, commits and devices of its runs. Raises: ConfigError without matplotlib."""
    has_jumps = any(jumps.values())
    with figure_as_png(path, width=14.0, height=5.0) as figure:
        ratios = [2.4, 1.0] if has_jumps else [1.0]
        curves, *bars = figure.subplots(1, len(ratios), squeeze=False, gridspec_kw={"width_ratios": ratios})[0]
        for border in borders:
            curves.axvline(border, color=INK, linewidth=0.6, linestyle=":", alpha=0.6)
        colours = {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(losses)}
        for arm, of_seed in losses.items():
            _draw_losses(curves, arm, list(of_seed.values()), colours[arm])
        curves.set_xlabel("step (optimizer updates)")
        curves.set_ylabel("training loss (nats/token)")
        curves.legend(frameon=False)
        write_title(curves, "Loss by order of training")
        for axes in bars:
            _draw_jumps(axes, jumps, colours, study.shuffle)
        write_footer(figure, [origin, _caption(losses, has_borders=bool(borders))])


def _caption(losses: LossesOfArms, *, has_borders: bool) -> str:
    dotted = " Dotted: borders of the blocks of the corpus. Bars: mean over seeds; dots: single seeds."
    seeds = seeds_text(losses.values()).capitalize()
    return (
        f"{seeds}. Lines: running means of {_SMOOTHED} steps, mean over seeds; thin: single seeds."
        f"{dotted if has_borders else ''}"
    )


def _draw_losses(axes: Any, arm: str, runs: Sequence[Float64[np.ndarray, " steps"]], colour: str) -> None:
    steps = min(len(one) for one in runs) if runs else 0
    if steps < _SMOOTHED:
        return
    kernel = np.ones(_SMOOTHED) / _SMOOTHED
    smooth = np.stack([np.convolve(one[:steps], kernel, mode="valid") for one in runs])
    places = np.arange(smooth.shape[1]) + (_SMOOTHED - 1) / 2
    for one in smooth:
        axes.plot(places, one, color=colour, linewidth=0.6, alpha=0.35)
    axes.plot(places, smooth.mean(axis=0), color=colour, linewidth=1.8, label=arm)
    low = min(float(smooth[:, steps // 10 :].min()), axes.get_ylim()[0]) if axes.lines else None
    axes.set_ylim(bottom=low)


def _draw_jumps(
    axes: Any, jumps: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], section: ShuffleSection
) -> None:
    """Draws a bar for each arm that has steps on both sides of a border, and a point for each seed."""
    measured = {arm: list(of_seed.values()) for arm, of_seed in jumps.items() if of_seed}
    for index, (arm, values) in enumerate(measured.items()):
        axes.bar(index, np.mean(values), color=colours[arm], width=0.6, alpha=0.85)
        axes.plot([index] * len(values), values, "o", color=INK, markersize=3.5)
    axes.axhline(0, color=INK, linewidth=0.7)
    names = [textwrap.fill(arm_label(arm), _NAME_COLUMNS) for arm in measured]
    axes.set_xticks(range(len(measured)), names, rotation=90 if len(names) > _MOST_UPRIGHT else 0)
    axes.set_ylabel(f"mean of {section.steps_around_border} steps after - before (nats/token)")
    write_title(axes, "Change at borders of blocks")
