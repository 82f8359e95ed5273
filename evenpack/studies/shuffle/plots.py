"""A shuffle study as a figure: the loss of each arm against the step, and its jumps at the borders of blocks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_title
from evenpack.studies.shuffle.config import ShuffleSection, ShuffleStudyConfig

_SMOOTHED = 5
"""Steps of a running mean, in the figure only."""

LossesOfArms = Mapping[str, Mapping[int, Float64[np.ndarray, " steps"]]]


def plot_shuffle(
    losses: LossesOfArms,
    jumps: Mapping[str, Mapping[int, float]],
    borders: Sequence[int],
    study: ShuffleStudyConfig,
    path: Path,
) -> None:
    """Draws the study. Raises: ConfigError without matplotlib."""
    with figure_as_png(path, width=14.0, height=5.0) as figure:
        curves, bars = figure.subplots(1, 2, gridspec_kw={"width_ratios": [2.4, 1], "wspace": 0.22})
        for border in borders:
            curves.axvline(border, color=INK, linewidth=0.6, linestyle=":", alpha=0.6)
        for colour, (arm, of_seed) in zip(COLOURS, losses.items(), strict=False):
            _draw_losses(curves, arm, list(of_seed.values()), colour)
        curves.set_xlabel("step")
        curves.set_ylabel("training loss (nats/target)")
        curves.legend(frameon=False)
        write_title(curves, "Loss by order of training")
        _draw_jumps(bars, jumps, study.shuffle)
        seeds = sorted({seed for of_seed in losses.values() for seed in of_seed})
        figure.text(
            0.125,
            -0.03,
            f"{study.study.name}, seeds {', '.join(map(str, seeds))}. Lines: running means of {_SMOOTHED} steps, mean "
            "over seeds; thin: single seeds. Dotted: borders of the blocks of the corpus.",
            fontsize=8.5,
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


def _draw_jumps(axes: Any, jumps: Mapping[str, Mapping[int, float]], section: ShuffleSection) -> None:
    """Draws a bar for each arm, and a point for each seed."""
    for index, (colour, (arm, of_seed)) in enumerate(zip(COLOURS, jumps.items(), strict=False)):
        if of_seed:
            values = list(of_seed.values())
            axes.bar(index, np.mean(values), color=colour, width=0.6, alpha=0.85, label=arm)
            axes.plot([index] * len(values), values, "o", color=INK, markersize=3.5)
    axes.axhline(0, color=INK, linewidth=0.7)
    axes.set_xticks(range(len(jumps)), list(jumps), rotation=15)
    axes.set_ylabel(f"change of the mean of {section.steps_around_border} steps (nats/target)")
    write_title(axes, "Change of the loss at borders of blocks")
