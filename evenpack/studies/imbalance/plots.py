"""Figure 5 of PackedBERT for any lengths: speed-up over padding by number of devices, and the time spent waiting."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    DENSE_PACKS,
    SCHEMES,
    UNPADDED_ARRIVAL,
    Scheme,
)
from evenpack.studies.imbalance.forecast import LogForecast
from evenpack.studies.imbalance.reference import PUBLISHED_CLUSTER, PUBLISHED_DEVICES, ReferenceCurve
from evenpack.studies.imbalance.simulation import Simulation
from evenpack.studies.imbalance.step_times import STEPS_WITHIN, SimulationRow
from evenpack.studies.plotting import figure_as_png, label_ends, write_title

_SHADES = {
    "packed": ("#93b5f7", "#5b8def", "#1d4ed8"),
    "unpadded": ("#c2410c", "#f59e0b", "#a16207", "#fb923c"),
    "padded": ("#9aa5b1", "#0f9d76", "#5fbf9f"),
}
_PUBLISHED = "#1f2933"
_LOG = "#c2255c"
_BANDS = (BALANCED_PACKS, UNPADDED_ARRIVAL)
"""Schemes whose single steps are shown; more bands would hide one another."""
_BEYOND = 1e6
"""A value that stands for infinity where an area has to end."""
_LEAST_SHARE = 0.01
"""Least percentage on a logarithmic axis; one device waits for nobody."""


@dataclass(frozen=True, kw_only=True)
class ImbalanceStudy:
    """The results of three sources."""

    origin: str
    """Origin of the lengths."""
    reference: ReferenceCurve
    forecast: LogForecast | None
    """Forecast of a log, if there is one."""
    simulation: Simulation


def plot_imbalance(study: ImbalanceStudy, path: Path) -> None:
    """Draws the speed-up over padding on the left, and the fraction of time spent waiting on the right.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=19.0, height=6.4) as figure:
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1.0], "wspace": 0.76})
        _draw_speed_ups(left, study)
        _draw_waiting(right, study.simulation)
        figure.text(0.125, 0.01, _caption(study), fontsize=9, va="top", linespacing=1.5)


def colour(scheme: Scheme) -> str:
    """Returns one hue per layout."""
    same = [one for one in SCHEMES if one.layout == scheme.layout]
    return _SHADES[scheme.layout][same.index(scheme)]


def _draw_speed_ups(axes: Any, study: ImbalanceStudy) -> None:
    ends = []
    for scheme in SCHEMES:
        rows = study.simulation.of(scheme)
        devices, values = [row.devices for row in rows], [row.speed_up for row in rows]
        if scheme in _BANDS:
            axes.fill_between(
                devices,
                [row.step_low for row in rows],
                [row.step_high for row in rows],
                color=colour(scheme),
                alpha=0.13,
                linewidth=0,
            )
        _draw_line(axes, devices, values, scheme)
        ends.append((f"{_name(scheme)} {values[-1]:.2f}", values[-1], colour(scheme)))
    ends.append(_draw_reference(axes, study.reference))
    if study.forecast is not None:
        ends.append(_draw_forecast(axes, study.forecast))
    _device_axis(axes, [row.devices for row in study.simulation.of(BASELINE)])
    axes.set_ylabel("speed-up over padding (sequences/s, on as many devices)")
    label_ends(axes, ends)
    write_title(axes, _finding(study.simulation))


def _draw_waiting(axes: Any, simulation: Simulation) -> None:
    ends = []
    schemes = [scheme for scheme in SCHEMES if scheme != DENSE_PACKS]
    for scheme in schemes:
        rows = simulation.of(scheme)
        shares = [max(100 * row.wait_share, _LEAST_SHARE) for row in rows]
        _draw_line(axes, [row.devices for row in rows], shares, scheme)
        ends.append((f"{_name(scheme)} {100 * rows[-1].wait_share:.2g} %", shares[-1], colour(scheme)))
    _device_axis(axes, [row.devices for row in simulation.of(BASELINE)])
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_SHARE, 100)
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01 or less", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_ylabel("time spent waiting for the slowest device (%, logarithmic)")
    label_ends(axes, ends)
    arrival, packs = (_last(simulation, scheme) for scheme in (UNPADDED_ARRIVAL, BALANCED_PACKS))
    write_title(
        axes,
        f"{_counted(arrival.devices)} wait {100 * arrival.wait_share:.2g} % of their time un-padded by arrival,\n"
        f"{100 * packs.wait_share:.2g} % on packs assigned by cost",
    )


def _draw_line(axes: Any, devices: Sequence[int], values: Sequence[float], scheme: Scheme) -> None:
    thick = scheme in (BALANCED_PACKS, UNPADDED_ARRIVAL)
    axes.plot(
        devices,
        values,
        color=colour(scheme),
        linewidth=2.6 if thick else 1.5,
        linestyle=(0, (5, 2)) if scheme == DENSE_PACKS else "-",
        marker="o",
        markersize=5 if thick else 3.5,
        zorder=3 if thick else 2,
    )


def _draw_reference(axes: Any, reference: ReferenceCurve) -> tuple[str, float, str]:
    """Draws the published curve, and the range of nine of ten steps of its law."""
    devices = np.array([row.devices for row in reference.rows])
    expected = [row.expected for row in reference.rows]
    axes.fill_between(
        devices,
        *(reference.single.at_hazard(-np.log1p(-percentile / 100) / devices) for percentile in STEPS_WITHIN),
        color=_PUBLISHED,
        alpha=0.07,
        linewidth=0,
    )
    axes.plot(devices, expected, color=_PUBLISHED, linewidth=1.6, linestyle=(0, (1, 1.5)))
    return f"{reference_name(reference)} {expected[-1]:.2f}", expected[-1], _PUBLISHED


def reference_name(reference: ReferenceCurve) -> str:
    """Returns a name of the reference for people."""
    if (reference.fitted, reference.devices) == (PUBLISHED_CLUSTER, PUBLISHED_DEVICES):
        return "published (BERT, 512)"
    return "reference"


def _draw_forecast(axes: Any, forecast: LogForecast) -> tuple[str, float, str]:
    """Draws the log's best law, and the range over all laws and their intervals.

    Below the log's own devices the laws diverge to infinity: values far above all others are outside the axes.
    """
    devices = np.array([row.devices for row in forecast.rows])
    expected, low, high = (
        np.array([[row.best.expected, row.lowest, row.highest] for row in forecast.rows]).clip(max=_BEYOND).T
    )
    bottom, top = axes.get_ylim()
    own = high[devices >= forecast.log_devices]
    top = max(top, 1.03 * own[own < _BEYOND].max(initial=0.0))
    axes.fill_between(devices, low, high, color=_LOG, alpha=0.12, linewidth=0)
    drawn = np.where(expected < _BEYOND, expected, np.nan)
    axes.plot(devices, drawn, color=_LOG, linewidth=1.8, linestyle=(0, (3, 1)), marker="s", markersize=4)
    axes.set_ylim(min(bottom, 0.97 * low.min()), top)
    if expected[-1] >= top:
        return f"log {forecast.rows[-1].best.expected:.2f}", top, _LOG
    return f"log {expected[-1]:.2f}", expected[-1], _LOG


def _device_axis(axes: Any, devices: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{count:,}" for count in devices], fontsize=10 if len(devices) < 10 else 8.5)
    axes.minorticks_off()
    axes.set_xlabel("devices (logarithmic)")


def _name(scheme: Scheme) -> str:
    policy = scheme.policy.replace("_", " ")
    if scheme == DENSE_PACKS:
        return "packed, dense attention"
    return "padded arrival: the baseline" if scheme == BASELINE else f"{scheme.layout} {policy}"


def _last(simulation: Simulation, scheme: Scheme) -> SimulationRow:
    return simulation.of(scheme)[-1]


def _finding(simulation: Simulation) -> str:
    arrival, packs = simulation.of(UNPADDED_ARRIVAL), _last(simulation, BALANCED_PACKS)
    first, last = arrival[0], arrival[-1]
    if first is last:
        return (
            f"On {_counted(last.devices)} un-padding by arrival has {last.speed_up:.2f} times padding's speed,\n"
            f"packs assigned by cost {packs.speed_up:.2f} times"
        )
    return (
        f"Un-padding by arrival falls from {first.speed_up:.2f} times padding's speed on {_counted(first.devices)}\n"
        f"to {last.speed_up:.2f} on {_counted(last.devices)}; packs assigned by cost reach {packs.speed_up:.2f} there"
    )


def _counted(devices: int) -> str:
    return f"{devices:,} device{'s' if devices > 1 else ''}"


def _widest(simulation: Simulation) -> float:
    return max((row.speed_up_high - row.speed_up_low) / 2 for row in simulation.rows)


def _caption(study: ImbalanceStudy) -> str:
    simulation = study.simulation
    options = simulation.options
    lines = [
        f"Lengths: {study.origin}. {options.batch} sequences or {simulation.packs_per_micro_batch} packs of "
        f"{simulation.pack_length:,} slots per micro-batch, {options.accumulation} per step and device; "
        f"{options.steps:,} simulated steps: means have an error of ± {_widest(simulation):.3f} (95 %).",
        f"Cost model: {simulation.cost.origin}.",
        f"Bands: nine of ten steps. Dotted, {reference_name(study.reference)}: un-padding by arrival as inferred from "
        f"{study.reference.devices} GPUs; the published one is of BERT-large at 512 tokens (PackedBERT, section E).",
    ]
    if study.forecast is not None:
        lines.append(
            f"Log: {study.forecast.path.name}, {study.forecast.steps_used:,} steps on {study.forecast.log_devices} "
            "devices; line: the law of lowest AIC, band: all laws with their intervals, "
            "cut off where it leaves the axes."
        )
    return "\n".join(lines)
