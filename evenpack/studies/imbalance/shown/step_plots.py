"""Figure 6 of PackedBERT for any lengths: the speed-up of single steps and its law."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.imbalance.results import ImbalanceStudy
from evenpack.studies.imbalance.shown.captions import measured_label, simulated_label
from evenpack.studies.imbalance.shown.styles import MEASURED, colour
from evenpack.studies.imbalance.simulated.cluster import UNPADDED_ARRIVAL
from evenpack.studies.imbalance.simulated.step_histogram import StepHistogram
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.statistics.laws import Gumbel

_CURVE_POINTS = 400
_TAIL = 0.0005
"""Probability outside of either end of a curve."""
_PANEL_INCHES = 6.4
_CHARACTERS_PER_INCH = 14.5
"""Characters of a caption's line."""


def plot_step_speed_ups(study: ImbalanceStudy, path: Path) -> None:
    """Draws a panel for each histogram: the simulated clusters, largest first, and the measured steps if there are any.

    Raises: ConfigError without matplotlib.
    """
    simulated = sorted(study.simulation.step_histograms, key=lambda one: -one.devices)
    measured = None if study.measured is None else study.measured.step_histogram
    kind = "Estimated" if study.simulation.cost.estimated else "Simulated"
    panels = [(one, f"{kind}, un-padded by arrival", False, _law_name(one, study)) for one in simulated]
    if study.measured is not None and measured is not None:
        panels.append((measured, f"Measured, {study.measured.run.layout or study.measured.run.label}", True, ""))
    width = _PANEL_INCHES * len(panels)
    with figure_as_png(path, width=width, height=4.8) as figure:
        drawn = figure.subplots(1, len(panels), squeeze=False, gridspec_kw={"wspace": 0.2, "left": 0.06, "right": 1})[0]
        for axes, (histogram, of, is_measured, law) in zip(drawn, panels, strict=True):
            _draw(axes, histogram, of=of, is_measured=is_measured, law=law)
        lines = [
            "Speed-up of a step: its sequences/s over those of padding in the long run, on as many devices. Titles: "
            "speed-up of a long run, as in the tables, which is below the mean of the steps' own. Simulated "
            f"steps are un-padded by arrival, {study.simulation.options.batch} sequences per micro-batch and device.",
            f"{simulated_label(study.simulation.cost)}. Cost model: {study.simulation.cost.origin}.",
            *([] if study.measured is None or measured is None else [f"{measured_label(study.measured)}."]),
            *(f"WARNING: {warning}." for warning in study.warnings),
            *study.footer,
        ]
        characters = round(_CHARACTERS_PER_INCH * width)
        write_footer(figure, [part for line in lines for part in textwrap.wrap(line, characters)])


def _law_name(histogram: StepHistogram, study: ImbalanceStudy) -> str:
    if study.reference is None:
        return ""
    if histogram.devices == study.reference.devices:
        return study.reference.name
    return f"inferred from {study.reference.devices} devices"


def _draw(axes: Any, histogram: StepHistogram, *, of: str, is_measured: bool, law: str) -> None:
    width = histogram.edges[1] - histogram.edges[0]
    kind = "measured" if is_measured else "simulated"
    axes.bar(
        histogram.edges[:-1],
        [count / (histogram.steps * width) for count in histogram.counts],
        width=width,
        align="edge",
        color=MEASURED["markerfacecolor"] if is_measured else colour(UNPADDED_ARRIVAL),
        alpha=0.8 if is_measured else 0.35,
        edgecolor=MEASURED["color"] if is_measured else "white",
        linewidth=0.8 if is_measured else 0.5,
        label=f"{histogram.steps:,} {kind} steps, deviation {histogram.deviation:.3f}",
    )
    top = axes.get_ylim()[1]
    if histogram.fitted is not None:
        _draw_law(axes, histogram.fitted, f"Gumbel fitted to them: {_parameters(histogram.fitted)}", COLOURS[0], "-")
    if histogram.beside is not None:
        _draw_law(axes, histogram.beside, f"{law}: {_parameters(histogram.beside)}", INK, (0, (1, 1.5)))
    axes.set_xlabel("speed-up of a step over padding (ratio of sequences/s)")
    axes.set_ylabel("density of steps (per unit of speed-up)")
    axes.set_ylim(top=1.45 * max(top, axes.get_ylim()[1]))
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    write_title(axes, _finding(histogram, of=of))


def _finding(histogram: StepHistogram, *, of: str) -> str:
    begin = (
        f"{of}, {histogram.devices:,} device{'s' if histogram.devices > 1 else ''}\n"
        f"{histogram.speed_up:.3f} times padding's speed; "
    )
    if histogram.fitted_distance is None:
        return f"{begin}all steps are equally fast"
    return f"{begin}Gumbel off by up to {100 * histogram.fitted_distance:.1f} %"


def _draw_law(axes: Any, law: Gumbel, label: str, line_colour: str, style: Any) -> None:
    low, high = law.frozen.ppf([_TAIL, 1 - _TAIL]).tolist()
    speed_ups = np.linspace(low, high, _CURVE_POINTS)
    axes.plot(speed_ups, law.frozen.pdf(speed_ups), color=line_colour, linewidth=2.0, linestyle=style, label=label)


def _parameters(law: Gumbel) -> str:
    return f"location {law.location:.3f}, scale {law.scale:.3f}"
