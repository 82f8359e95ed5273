"""A shuffle study as a figure: the loss of each arm against the step, and its jumps at the borders of blocks."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.runs.arms import arm_label, seeds_text
from evenpack.studies.shuffle.config import ShuffleSection, ShuffleStudyConfig

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
