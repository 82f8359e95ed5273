"""Figure 6 of PackedBERT for any lengths: the speed-up of single steps and its law."""

from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.imbalance.cluster import UNPADDED_ARRIVAL
from evenpack.studies.imbalance.plots import ImbalanceStudy, colour, reference_name
from evenpack.studies.imbalance.step_histogram import StepHistogram
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_title
from evenpack.studies.statistics.laws import Gumbel

_CURVE_POINTS = 400
_TAIL = 0.0005
"""Probability outside of either end of a curve."""


def plot_step_speed_ups(study: ImbalanceStudy, path: Path) -> None:
    """Draws a panel for each histogram: the simulated clusters, largest first, and the log if there is one.

    Raises: ConfigError without matplotlib.
    """
    simulated = sorted(study.simulation.step_histograms, key=lambda one: -one.devices)
    panels = [(one, "simulated", _law_name(one, study)) for one in simulated]
    if study.forecast is not None:
        panels.append((study.forecast.step_histogram, "logged", ""))
    with figure_as_png(path, width=7.2 * len(panels), height=4.8) as figure:
        drawn = figure.subplots(1, len(panels), squeeze=False, gridspec_kw={"wspace": 0.24})[0]
        for axes, (histogram, origin, law) in zip(drawn, panels, strict=True):
            _draw(axes, histogram, origin=origin, law=law)
        caption = (
            f"Lengths: {study.origin}; {study.simulation.options.batch} sequences per device. Speed-up of a step: its "
            f"sequences/s un-padded, by arrival, over the mean of padding on as many devices.\n"
            f"Cost model: {study.simulation.cost.origin}."
        )
        figure.text(0.125, -0.03, caption, fontsize=9, va="top", linespacing=1.5)


def _law_name(histogram: StepHistogram, study: ImbalanceStudy) -> str:
    if histogram.devices == study.reference.devices:
        return reference_name(study.reference)
    return f"inferred from {study.reference.devices} devices"


def _draw(axes: Any, histogram: StepHistogram, *, origin: str, law: str) -> None:
    width = histogram.edges[1] - histogram.edges[0]
    axes.bar(
        histogram.edges[:-1],
        [count / (histogram.steps * width) for count in histogram.counts],
        width=width,
        align="edge",
        color=colour(UNPADDED_ARRIVAL),
        alpha=0.35,
        edgecolor="white",
        linewidth=0.5,
        label=f"{histogram.steps:,} {origin} steps: mean {histogram.mean:.3f}, deviation {histogram.deviation:.3f}",
    )
    if histogram.fitted is not None:
        _draw_law(axes, histogram.fitted, f"Gumbel fitted to them: {_parameters(histogram.fitted)}", COLOURS[0], "-")
    if histogram.beside is not None:
        _draw_law(axes, histogram.beside, f"{law}: {_parameters(histogram.beside)}", INK, (0, (1, 1.5)))
    axes.set_xlabel("speed-up of a step over padding")
    axes.set_ylabel("density of steps (per unit of speed-up)")
    axes.set_ylim(top=1.45 * axes.get_ylim()[1])
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    write_title(axes, _finding(histogram))


def _finding(histogram: StepHistogram) -> str:
    devices = f"{histogram.devices:,} device{'s' if histogram.devices > 1 else ''}"
    finding = f"On {devices} un-padded steps have {histogram.mean:.2f} times padding's speed;"
    if histogram.fitted_distance is None:
        return f"{finding}\nall are equally fast"
    return f"{finding}\na fitted Gumbel is off by up to {100 * histogram.fitted_distance:.1f} % of them"


def _draw_law(axes: Any, law: Gumbel, label: str, line_colour: str, style: Any) -> None:
    low, high = law.frozen.ppf([_TAIL, 1 - _TAIL]).tolist()
    speed_ups = np.linspace(low, high, _CURVE_POINTS)
    axes.plot(speed_ups, law.frozen.pdf(speed_ups), color=line_colour, linewidth=2.0, linestyle=style, label=label)


def _parameters(law: Gumbel) -> str:
    return f"location {law.location:.3f}, scale {law.scale:.3f}"
