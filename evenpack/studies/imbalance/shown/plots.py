"""Figure 5 of PackedBERT for any lengths: speed-up over padding by number of devices, and the time spent waiting.

Marks tell apart what was measured (filled diamonds), what was replayed on one device (triangles), what is simulated
(circles, hollow where the cost model is an estimate), what is estimated from measured steps (squares), and what is
published (dots without marks).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.studies.imbalance.extrapolated.forecast import LogForecast
from evenpack.studies.imbalance.extrapolated.reference import ReferenceCurve
from evenpack.studies.imbalance.measured.measurement import Measured
from evenpack.studies.imbalance.measured.replay import REPLAYED, Replay
from evenpack.studies.imbalance.results import ImbalanceStudy
from evenpack.studies.imbalance.shown.captions import caption, legend
from evenpack.studies.imbalance.shown.styles import (
    LOG,
    LOG_STYLE,
    MEASURED,
    PUBLISHED,
    PUBLISHED_STYLE,
    REPLAYED_STYLE,
    colour,
)
from evenpack.studies.imbalance.simulated.cluster import (
    BALANCED_PACKS,
    BASELINE,
    DENSE_PACKS,
    SCHEMES,
    UNPADDED_ARRIVAL,
    Scheme,
)
from evenpack.studies.imbalance.simulated.simulation import Simulation
from evenpack.studies.imbalance.simulated.step_times import STEPS_WITHIN
from evenpack.studies.plotting import figure_as_png, label_ends, write_footer, write_title

_BANDS = (BALANCED_PACKS, UNPADDED_ARRIVAL)
"""Schemes whose single steps are shown; more bands would hide one another."""
_BEYOND = 1e6
"""A value that stands for infinity where an area has to end."""
_LEAST_SHARE = 0.01
"""Least percentage on a logarithmic axis; one device waits for nobody."""


def plot_imbalance(study: ImbalanceStudy, path: Path) -> None:
    """Draws the speed-up over padding above, and the fraction of time spent waiting below.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=9.5, height=11.0) as figure:
        above, below = figure.subplots(2, 1, gridspec_kw={"hspace": 0.36, "left": 0.08, "right": 0.72})
        _draw_speed_ups(above, study)
        _draw_waiting(below, study)
        figure.legend(handles=legend(study), loc="lower left", bbox_to_anchor=(0.02, 0.94), frameon=False, fontsize=9.5)
        write_footer(figure, [*caption(study), *study.footer])


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
        _draw_line(axes, devices, values, scheme, is_hollow=study.simulation.cost.estimated)
        ends.append((f"{_name(scheme)} {values[-1]:.2f}", values[-1], colour(scheme)))
    if study.reference is not None:
        ends.append(_draw_reference(axes, study.reference))
    if study.forecast is not None:
        ends.append(_draw_forecast(axes, study.forecast))
    if study.replay is not None:
        _draw_replayed_speed_ups(axes, study.replay)
    _draw_measured_speed_up(axes, study.measured)
    _device_axis(axes, study)
    axes.set_ylabel("speed-up over padding by arrival (ratio of sequences/s)")
    label_ends(axes, ends)
    write_title(axes, _finding(study.simulation if study.replay is None else study.replay, _kind(study)))


def _draw_waiting(axes: Any, study: ImbalanceStudy) -> None:
    ends = []
    simulation = study.simulation
    schemes = [scheme for scheme in SCHEMES if scheme != DENSE_PACKS]
    for scheme in schemes:
        rows = simulation.of(scheme)
        shares = [max(100 * row.wait_share, _LEAST_SHARE) for row in rows]
        _draw_line(axes, [row.devices for row in rows], shares, scheme, is_hollow=simulation.cost.estimated)
        ends.append((f"{_name(scheme)} {100 * rows[-1].wait_share:.2g} %", shares[-1], colour(scheme)))
    if study.measured is not None and study.measured.run.wait_share is not None:
        measured = study.measured.run
        axes.plot([measured.ranks], [max(100 * (measured.wait_share or 0.0), _LEAST_SHARE)], **MEASURED)
    _device_axis(axes, study)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_SHARE, 100)
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01 or less", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_ylabel("waiting for the slowest device (% of time, logarithmic)")
    label_ends(axes, ends)
    if study.replay is not None:
        for scheme in REPLAYED:
            waits = [(row.devices, max(100 * row.wait_share, _LEAST_SHARE)) for row in study.replay.of(scheme)]
            axes.errorbar(*zip(*waits, strict=True), color=colour(scheme), **REPLAYED_STYLE)
    first = simulation if study.replay is None else study.replay
    arrival, packs = (first.of(scheme)[-1] for scheme in (UNPADDED_ARRIVAL, BALANCED_PACKS))
    write_title(
        axes,
        f"{_kind(study)}: {_counted(arrival.devices)} wait {100 * arrival.wait_share:.2g} % of their time\n"
        f"un-padded by arrival, {100 * packs.wait_share:.2g} % on packs assigned by cost",
    )


def _draw_line(axes: Any, devices: Sequence[int], values: Sequence[float], scheme: Scheme, *, is_hollow: bool) -> None:
    thick = scheme in (BALANCED_PACKS, UNPADDED_ARRIVAL)
    axes.plot(
        devices,
        values,
        color=colour(scheme),
        linewidth=2.6 if thick else 1.5,
        linestyle=(0, (5, 2)) if scheme == DENSE_PACKS else "-",
        marker="o",
        markersize=6 if thick else 4,
        markerfacecolor="white" if is_hollow else colour(scheme),
        zorder=3 if thick else 2,
    )


def _draw_reference(axes: Any, reference: ReferenceCurve) -> tuple[str, float, str]:
    """Draws the published curve, and the range of nine of ten steps of its law."""
    devices = np.array([row.devices for row in reference.rows])
    expected = [row.expected for row in reference.rows]
    axes.fill_between(
        devices,
        *(reference.single.at_hazard(-np.log1p(-percentile / 100) / devices) for percentile in STEPS_WITHIN),
        color=PUBLISHED,
        alpha=0.07,
        linewidth=0,
    )
    axes.plot(devices, expected, **PUBLISHED_STYLE)
    return f"{reference.name} {expected[-1]:.2f}", expected[-1], PUBLISHED


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
    axes.fill_between(devices, low, high, color=LOG, alpha=0.12, linewidth=0)
    drawn = np.where(expected < _BEYOND, expected, np.nan)
    axes.plot(devices, drawn, **LOG_STYLE)
    axes.set_ylim(min(bottom, 0.97 * low.min()), top)
    last = float(forecast.rows[-1].best.expected)
    return f"from measured steps {last:.2f}", top if expected[-1] >= top else last, LOG


def _draw_measured_speed_up(axes: Any, measured: Measured | None) -> None:
    if measured is None or not measured.is_over_padding:
        return
    speed_up, reach = measured.speed_up, measured.speed_up_interval
    assert speed_up is not None, "there is a baseline"
    assert reach is not None, "there is a baseline"
    bar = [[speed_up - reach.low], [reach.high - speed_up]]
    axes.errorbar([measured.run.ranks], [speed_up], yerr=bar, capsize=5, elinewidth=1.8, **MEASURED)


def _draw_replayed_speed_ups(axes: Any, replay: Replay) -> None:
    for scheme in REPLAYED:
        rows = replay.of(scheme)
        values = [row.speed_up for row in rows]
        bars = [[row.speed_up - row.speed_up_low for row in rows], [row.speed_up_high - row.speed_up for row in rows]]
        axes.errorbar([row.devices for row in rows], values, yerr=bars, color=colour(scheme), **REPLAYED_STYLE)


def _device_axis(axes: Any, study: ImbalanceStudy) -> None:
    counts = {row.devices for row in study.simulation.of(BASELINE)}
    devices = sorted(counts if study.measured is None else counts | {study.measured.run.ranks})
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{count:,}" for count in devices], fontsize=10 if len(devices) < 10 else 8.5)
    axes.minorticks_off()
    axes.set_xlabel("devices (logarithmic)")


def _name(scheme: Scheme) -> str:
    policy = scheme.policy.replace("_", " ")
    if scheme == DENSE_PACKS:
        return "packed, dense attention"
    return "padded arrival: the baseline" if scheme == BASELINE else f"{scheme.layout} {policy}"


def _kind(study: ImbalanceStudy) -> str:
    if study.replay is not None:
        return "Replayed"
    return "Estimate" if study.simulation.cost.estimated else "Simulation"


def _finding(found: Simulation | Replay, kind: str) -> str:
    arrival, packs = found.of(UNPADDED_ARRIVAL), found.of(BALANCED_PACKS)[-1]
    first, last = arrival[0], arrival[-1]
    begin = f"{kind}: un-padding by arrival has {first.speed_up:.2f} times padding's speed on"
    if first is last:
        return f"{begin} {_counted(last.devices)},\npacks assigned by cost {packs.speed_up:.2f} times"
    return (
        f"{begin} {_counted(first.devices)}\n"
        f"and {last.speed_up:.2f} times on {_counted(last.devices)}, packs assigned by cost {packs.speed_up:.2f} times "
        "there"
    )


def _counted(devices: int) -> str:
    return f"{devices:,} device{'s' if devices > 1 else ''}"
