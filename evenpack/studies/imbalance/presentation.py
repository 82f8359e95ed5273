"""The tables and figures of `evenpack study imbalance`: figures 5 and 6 of PackedBERT for any lengths.

In tables a line is a layout and policy, and a column a number of devices. In figures marks tell apart what was measured
(filled diamonds), what was replayed on one device (triangles), what is simulated (circles, hollow where the cost model
is an estimate), what is estimated from measured steps (squares), and what is published (dots without marks).
"""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.columns import Cells, Column, cells, cells_across, cells_by_column, table_of
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    DENSE_PACKS,
    SCHEMES,
    UNPADDED_ARRIVAL,
    UNPADDED_BALANCED,
    Scheme,
)
from evenpack.studies.imbalance.extrapolation import LogForecast, ReferenceCurve
from evenpack.studies.imbalance.measurement import Cut, MeasuredComparison, MeasuredSteps
from evenpack.studies.imbalance.replay import REPLAYED, Replay, SlowestRow
from evenpack.studies.imbalance.simulation import STEPS_WITHIN, SchemeRow, Simulation, StepHistogram
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.imbalance.study import ImbalanceStudy, StepOfRun
from evenpack.studies.plotting import (
    COLOURS,
    INK,
    draw_band,
    draw_series,
    figure_as_png,
    label_ends,
    logarithmic_counts,
    write_footer,
    write_title,
)
from evenpack.studies.statistics.laws import Gumbel
from evenpack.units import counted

_DEVICE_COUNT = Column("devices", form=",")
_SPEED_UP_OF_A_LONG_RUN = Column("speed-up", "speed_up", ".3f")
_SPEED_UP_WITH_INTERVAL = Column(
    "speed-up", lambda row: f"{row.speed_up:.3f} ({row.speed_up_low:.3f} to {row.speed_up_high:.3f})"
)
_WAIT_SHARE = Column("Fraction of the devices' time spent waiting for the slowest", "wait_share", ".2%")
_OF_EACH_SCHEME = (
    _WAIT_SHARE,
    Column("Slowest device over the mean one, mean over steps", "slowest_over_mean", ".4f"),
    Column("Efficiency: sequences/s per device, relative to one device", "efficiency", ".4f"),
)
"""Results that have a table of their own each, whose title is the heading."""
_CROSSINGS = (
    Column("", lambda crossing: f"{crossing.layout} {crossing.policy}"),
    Column("against"),
    Column("it", "verdict"),
    Column(
        "between devices",
        lambda one: None if one.last_before is None else f"{one.last_before:,} and {one.first_after:,}",
    ),
)
_NEEDS = (
    Column("", "label"),
    Column("packs made before training", lambda scheme: _needed(scheme.needs.packing)),
    Column("plan of the whole step", lambda scheme: _needed(scheme.needs.plan)),
    Column("sort of the step", lambda scheme: scheme.needs.sort or "no"),
    Column("shapes", lambda scheme: scheme.needs.shapes),
)
_INFERENCES = (
    Column("median and mode (published)", "expected", ".3f"),
    Column("mean and deviation", "by_moments", ".3f"),
    Column("the cluster's own law", "direct", ".3f"),
)
_LOGGED_STEPS = (
    Column("name", "label"),
    Column("layout", missing="not recorded"),
    Column("steps", "steps_used", ","),
    Column("sequences/s", "sequences_per_second", ",.4g"),
    Column("95 %", "interval", ",.4g"),
    Column("waiting", "wait_share", ".2%"),
    Column("commit"),
)
_SLOWEST = (
    Column("devices"),
    Column("steps"),
    Column("replayed, s", lambda row: f"{row.seconds:.4g} ± {row.standard_error:.2g}"),
    Column("by order statistics", lambda row: _forecast(row.forecast.order_statistics, row)),
    Column("by a law", lambda row: _forecast(row.forecast.by_law, row)),
    Column("law", lambda row: row.forecast.law.replace("_", " ")),
)
_FITS = (
    Column("law", lambda fit: fit.name.replace("_", " ")),
    Column("parameters", lambda fit: ", ".join(f"{name} {value:.4g}" for name, value in vars(fit.law).items())),
    Column("95 %", lambda fit: "; ".join(f"{each:.4g}" for each in fit.intervals.values()) or None),
    Column("AIC", "aic", ".1f"),
    Column("KS distance", "ks_distance", ".4f"),
    Column("p", "ks_p_value", ".3f"),
)
_LIMITS = (
    Column("lowest, with 95 % intervals", "lowest", ".3f"),
    Column("highest, with 95 % intervals", "highest", ".3f"),
    Column("extrapolated"),
)


def imbalance_tables(study: ImbalanceStudy) -> list[RenderableType]:
    """Returns all tables."""
    shown: list[RenderableType] = [] if study.replay is None else _replay_tables(study.replay)
    shown += [_setting_table(study), _speed_up_table(study), console.text(_headline(study.simulation))]
    shown.append(table_of(SCHEMES, _NEEDS, title="What each needs"))
    shown += [
        WideTable(rows=_scheme_rows(study.simulation, SCHEMES, column), title=column.heading)
        for column in _OF_EACH_SCHEME
    ]
    title = "Comparison with packs, at the simulated numbers of devices (95 %)"
    shown.append(table_of(study.simulation.crossings, _CROSSINGS, title=title))
    if study.reference is not None:
        shown += _reference_tables(study.reference)
    if study.measured is not None:
        shown += _measured_tables(study.measured, study.simulation)
    if study.forecast is not None:
        shown += _forecast_tables(study.forecast)
    warnings = [*study.warnings, *(() if study.forecast is None else study.forecast.warnings)]
    lines = [*study.notes, *(f"warning: {warning}" for warning in dict.fromkeys(warnings))]
    return [*shown, console.text("\n".join(lines))] if lines else shown


def _setting_table(study: ImbalanceStudy) -> RenderableType:
    simulation = study.simulation
    options = simulation.options
    reduced = "left out"
    if options.bandwidth is not None:
        reduced = (
            f"{options.all_reduce_bytes:.4g} bytes in a ring at {options.bandwidth / 1e9:.4g} GB/s, not overlapped"
        )
    return pairs(
        {
            "micro-batch": f"{options.batch:,} sequences, or {simulation.packs_per_micro_batch:,} packs of "
            f"{simulation.pack_length:,} slots (by {simulation.packing_algorithm}, "
            f"{simulation.packing_factor:.3f} sequences per pack)",
            "step": f"{options.accumulation} micro-batch{'es' if options.accumulation > 1 else ''} per device, ZeRO "
            f"{options.zero_stage}: devices wait " + ("in every micro-batch" if options.waits_often else "once a step"),
            **({} if study.step is None else {"of the run": _of_run(study.step)}),
            "cost model": f"{simulation.cost.name}: {simulation.cost.origin}",
            "attention": "causal: a padded row costs its width squared"
            if simulation.causal
            else "bidirectional: a padded row costs length² + padding²",
            "all-reduce": reduced,
            "noise": _noise(study),
            "steps": f"{options.steps:,} of each cluster, seed {options.seed}",
        },
        title=f"Clusters on {study.subject.origin}",
    )


def _needed(is_needed: bool) -> str:
    return "yes" if is_needed else "no"


def _noise(study: ImbalanceStudy) -> str:
    noise, fitted = study.simulation.options.noise, study.fitted_noise
    line = f"{percent(noise)} of a micro-batch's seconds" if noise else "none"
    if fitted is None:
        return line
    return (
        f"{line}, so that single steps on {fitted.devices} devices have the deviation of the published law, "
        f"{fitted.deviation_of_law:.3f}; by their lengths alone it is {fitted.deviation_of_lengths:.3f}"
    )


def _of_run(step: StepOfRun) -> str:
    items = f"{step.packs} packs" if step.packs is not None else f"{step.batch} sequences"
    if step.ranks is None:
        return f"{items} per micro-batch; it has not trained, so its ranks and its accumulation are not known"
    accumulation = "" if step.accumulation is None else f", {step.accumulation} to a step,"
    return f"{items} per micro-batch{accumulation} on its {step.ranks} ranks; ZeRO {step.zero_stage}"


def _speed_up_table(study: ImbalanceStudy) -> RenderableType:
    """Returns the speed-ups: simulated lines first, then what is published and what follows from measured steps."""
    rows = _scheme_rows(study.simulation, SCHEMES, _SPEED_UP_OF_A_LONG_RUN)
    for scheme, line in zip(SCHEMES, rows, strict=True):
        line["95 %, widest"] = f"± {_widest(study.simulation.of(scheme)):.4f}"
    if study.reference is not None:
        published = {f"{row.devices:,}": f"{row.expected:.3f}" for row in study.reference.rows}
        spread = max(row.spread for row in study.reference.rows)
        name = f"{study.reference.name}: unpadded arrival, mean step"
        rows.append({"": name, **published, "95 %, widest": f"laws differ by {spread:.2f}"})
    if study.forecast is not None and study.measured is not None:
        logged = {f"{row.devices:,}": f"{row.best.expected:.3f}" for row in study.forecast.rows}
        width = max((row.highest - row.lowest) / 2 for row in study.forecast.rows)
        name = f"estimated from {study.measured.run.label}, mean step"
        rows.append({"": name, **logged, "95 %, widest": f"± {width:.2f}, all laws"})
    simulated = "ESTIMATED" if study.simulation.cost.estimated else "simulated"
    return WideTable(
        rows=rows, title=f"Speed-up over padding by arrival (sequences/s of a long run), {simulated}, by devices"
    )


def _headline(simulation: Simulation) -> str:
    """Returns what is left between un-padding and packs where both are balanced, and what balancing needs."""
    both = zip(simulation.of(UNPADDED_BALANCED), simulation.of(BALANCED_PACKS), strict=True)
    percents = [100 * (un_padded.speed_up / packed.speed_up - 1) for un_padded, packed in both]
    return (
        f"Un-padding assigned by cost differs from packs assigned by cost by {min(percents):+.2f} to "
        f"{max(percents):+.2f} % in sequences/s, over these numbers of devices; what falls behind is un-padding in the "
        "order of arrival. Assigning by cost needs the lengths of the whole step before it begins; packs keep one "
        "shape and equal counts without that."
    )


def _replay_tables(replay: Replay) -> list[RenderableType]:
    """Returns what was replayed: the speed-up with its interval, and the waiting."""
    facts = pairs(
        {
            "device": replay.described(),
            "each device": f"{replay.accumulation} micro-batch{'es' if replay.accumulation > 1 else ''} of "
            f"{replay.batch} sequences, or {replay.packs} packs; ZeRO {replay.zero_stage}",
            "update": f"{1e3 * replay.update_seconds:.3g} ms, as measured on this device alone",
            "steps": ", ".join(f"{row.steps:,} on {row.devices:,}" for row in replay.of(BASELINE)) + " devices",
            "timed": f"{replay.timed_parts:,} parts of steps; no network",
        },
        title="Replayed on one device: every micro-batch of each cluster, one after another",
    )
    speed_ups = _scheme_rows(replay, REPLAYED, _SPEED_UP_WITH_INTERVAL)
    waits = _scheme_rows(replay, REPLAYED, _WAIT_SHARE)
    return [
        facts,
        WideTable(rows=speed_ups, title="Speed-up over padding by arrival (95 %), REPLAYED, by devices"),
        WideTable(rows=waits, title=f"{_WAIT_SHARE.heading}, REPLAYED"),
        *([_slowest_table(replay)] if replay.forecasts else []),
    ]


def _slowest_table(replay: Replay) -> RenderableType:
    title = (
        "Slowest device un-padded by arrival: replayed, and predicted from "
        f"{replay.forecasts[0].steps_of_one} steps of one device over other sequences"
    )
    return table_of(replay.forecasts, _SLOWEST, title=title)


def _forecast(seconds: float, row: SlowestRow) -> str:
    return f"{seconds:.4g} ({100 * (seconds / row.seconds - 1):+.1f} %)"


def _scheme_rows(source: Simulation | Replay, schemes: Sequence[Scheme], value: Column) -> Cells:
    return cells_across({scheme.label: source.of(scheme) for scheme in schemes}, heading=_DEVICE_COUNT, value=value)


def _reference_tables(reference: ReferenceCurve) -> list[RenderableType]:
    rows = cells_by_column(reference.rows, _INFERENCES, heading=_DEVICE_COUNT)
    facts = pairs(
        {
            "cluster": f"{reference.devices} devices, Gumbel of location {reference.fitted.location:.4f}, scale "
            f"{reference.fitted.scale:.4f}: mean {reference.fitted_mean:.4f}",
            "one device": f"location {reference.single.location:.4f}, scale {reference.single.scale:.4f}",
            "error of the inference": f"predicts {reference.expected_at_fitted:.4f} at {reference.devices} devices: "
            f"{reference.model_error_at_fitted:+.4f}",
        },
        title=f"Inferred from a cluster, {reference.name}: un-padding by arrival (PackedBERT, section E)",
    )
    return [facts, WideTable(rows=rows, title="One device's law by")]


def _measured_tables(measured: MeasuredComparison, simulation: Simulation) -> list[RenderableType]:
    """Returns the measured rates, the speed-up beside the simulated one, and what was left out of the logs."""
    sides = [measured.run] if measured.baseline is None else [measured.run, measured.baseline]
    ranks = measured.run.ranks
    rows = [{"": name} | line for name, line in zip(("run", "baseline"), cells(sides, _LOGGED_STEPS), strict=False)]
    device = measured.run.device or "device not recorded"
    shown: list[RenderableType] = [table(rows, title=f"Measured on {ranks} x {device}")]
    if measured.speed_up is not None and measured.speed_up_interval is not None:
        shown.append(
            pairs(
                {
                    "over": _over(measured),
                    "measured": f"{measured.speed_up:.3f} (95 %: {measured.speed_up_interval:.3f})",
                    f"simulated, {'ESTIMATED' if simulation.cost.estimated else 'measured'} cost model": _simulated(
                        measured, simulation
                    ),
                },
                title=f"Speed-up of {measured.run.label} on {ranks} devices",
            )
        )
    return [*shown, console.text("\n".join(line for side in sides for line in _log_lines(side)))]


def _log_lines(side: MeasuredSteps) -> list[str]:
    """Returns which steps of a log are used, with a line for each reason to cut others."""
    used = f"{side.path}: {side.format}; {side.steps_used:,} of {side.steps_read:,} steps used"
    return [used, *cut_lines(side.cuts)]


def cut_lines(cuts: Sequence[Cut]) -> list[str]:
    """Returns a line for each reason, however many ranges of lines were cut for it."""
    by_reason: dict[str, list[Cut]] = {}
    for cut in cuts:
        by_reason.setdefault(cut.reason, []).append(cut)
    lines = []
    for reason, same in by_reason.items():
        steps = sum(cut.steps for cut in same)
        places = f" in {len(same):,} places" if len(same) > 1 else ""
        first, last = same[0].first_line, same[-1].last_line
        where = f"line {first:,}" if first == last else f"lines {first:,} to {last:,}"
        lines.append(f"cut {counted(steps, 'step')}{places}, {where}: {reason}")
    return lines


def _forecast_tables(forecast: LogForecast) -> list[RenderableType]:
    """Returns the laws that were fitted to the measured steps, and what follows for other numbers of devices.

    That is the speed-up by every method, and the range over all of them with their intervals.
    """
    title = (
        f"Laws of the measured steps: speed-up over {forecast.padded_baseline:,.4g} sequences/s on "
        f"{forecast.log_devices} devices"
    )
    best = forecast.fits.best.name
    lines: dict[str, dict[str, Any]] = {}
    for row in forecast.rows:
        for estimate in row.estimates:
            name = f"{estimate.method.replace('_', ' ')}{' (lowest AIC)' if estimate.method == best else ''}"
            lines.setdefault(name, {"": name})[f"{row.devices:,}"] = f"{estimate.expected:.3f}"
    limits = cells_by_column(forecast.rows, _LIMITS, heading=_DEVICE_COUNT)
    return [
        table_of(forecast.fits.fits, _FITS, title=title),
        WideTable(rows=[*lines.values(), *limits], title="Estimated from measured steps: speed-up by each method"),
    ]


def _over(measured: MeasuredComparison) -> str:
    if measured.baseline is None:
        return f"{measured.padded_baseline:,.4g} sequences/s (--padded-baseline)"
    return f"{measured.baseline.label}: {measured.baseline.layout or 'layout not recorded'}"


def _simulated(measured: MeasuredComparison, simulation: Simulation) -> str:
    """Returns the same ratio of the simulated rates, or why there is none."""
    schemes = [measured.run.scheme, BASELINE if measured.baseline is None else measured.baseline.scheme]
    rows = [
        row
        for scheme in schemes
        if scheme is not None
        for row in simulation.of(scheme)
        if row.devices == measured.run.ranks
    ]
    if None in schemes:
        return "not simulated in this layout"
    if len(rows) < 2:
        return f"not simulated: --devices leaves out {measured.run.ranks}"
    return f"{rows[0].speed_up / rows[1].speed_up:.3f}"


_SHADES = {
    "packed": ("#38bdf8", "#6b8af7", "#1e40af"),
    "unpadded": ("#c2410c", "#eab308", "#78350f", "#fb923c"),
    "padded": ("#7b8794", "#047857", "#84cc16"),
}

PUBLISHED = INK
LOG = "#c2255c"

MEASURED: dict[str, Any] = {
    "color": "#111111",
    "marker": "D",
    "markersize": 9,
    "markerfacecolor": "#facc15",
    "markeredgewidth": 1.6,
    "linestyle": "none",
    "zorder": 6,
}
_REPLAYED: dict[str, Any] = {
    "marker": "^",
    "markersize": 9,
    "markeredgecolor": INK,
    "markeredgewidth": 1.0,
    "linestyle": "none",
    "zorder": 5,
}
_LOG_STYLE: dict[str, Any] = {"color": LOG, "linewidth": 1.8, "linestyle": (0, (3, 1)), "marker": "s", "markersize": 4}
_PUBLISHED_STYLE: dict[str, Any] = {"color": PUBLISHED, "linewidth": 1.6, "linestyle": (0, (1, 1.5))}
_LEGEND_CHARACTERS = 120
"""Characters of a legend's line."""
_MEAN_STEP = (
    "What is estimated from measured steps is the mean of their speed-ups, which is above that of a long run (the "
    "measured point, the simulated lines) where steps scatter."
)
_DEVICES = Column("devices", axis="devices (logarithmic)")
_RANKS = Column("devices", "ranks", axis="devices (logarithmic)")
_SPEED_UP = Column("speed-up", "speed_up", axis="speed-up over padding by arrival (ratio of sequences/s)")
_LOW, _HIGH = Column("low", "speed_up_low"), Column("high", "speed_up_high")
_STEP_LOW, _STEP_HIGH = Column("low", "step_low"), Column("high", "step_high")
_WAITING = Column(
    "waiting",
    lambda row: max(100 * row.wait_share, _LEAST_SHARE),
    axis="waiting for the slowest device (% of time, logarithmic)",
)
_BANDS = (BALANCED_PACKS, UNPADDED_ARRIVAL)
"""Schemes whose single steps are shown; more bands would hide one another."""
_BEYOND = 1e6
"""A value that stands for infinity where an area has to end."""
_LEAST_SHARE = 0.01
"""Least percentage on a logarithmic axis; one device never waits."""
_CURVE_POINTS = 400
_TAIL = 0.0005
"""Probability outside of either end of a curve."""
_MARK_WIDTH = 0.018
"""Width of a replayed mark, as a fraction of the axis."""
_NEEDS_AT = (0.42, 0.76, 1.05, 1.28)
"""Where the columns of the table in the figure begin, as fractions of the axes' width."""
_PANEL_INCHES = 6.4
_CHARACTERS_PER_INCH = 14.5
"""Characters of a caption's line."""


def colour(scheme: Scheme) -> str:
    """Returns one hue per layout."""
    same = [one for one in SCHEMES if one.layout == scheme.layout]
    return _SHADES[scheme.layout][same.index(scheme)]


def legend(study: ImbalanceStudy) -> list[Any]:
    """Returns a handle for each kind of evidence in the figure, with what it is called."""
    from matplotlib.lines import Line2D

    face = "white" if study.simulation.cost.estimated else INK
    circles: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 6, "markerfacecolor": face}
    handles = [Line2D([], [], label=simulated_label(study.simulation.cost), **circles)]
    if study.replay is not None:
        triangle: dict[str, Any] = {"color": INK, "marker": "^", "markersize": 8, "linestyle": "none"}
        handles.append(Line2D([], [], label=replayed_label(study.replay), **triangle))
    if study.measured is not None:
        handles.append(Line2D([], [], label=measured_label(study.measured), **MEASURED))
    if study.measured is not None and study.forecast is not None:
        run = study.measured.run
        label = (
            f"ESTIMATED from the measured steps of {run.label} on {run.ranks} devices: mean step by the law of lowest "
            "AIC; band: all laws with their intervals"
        )
        handles.append(Line2D([], [], label=label, **_LOG_STYLE))
    if study.reference is not None:
        label = (
            f"{study.reference.name}: un-padding by arrival, ESTIMATED from {study.reference.devices} GPUs "
            "(PackedBERT, section E); band: nine of ten steps"
        )
        handles.append(Line2D([], [], label=label, **_PUBLISHED_STYLE))
    for handle in handles:
        handle.set_label("\n".join(textwrap.wrap(str(handle.get_label()), _LEGEND_CHARACTERS)))
    return handles


def simulated_label(cost: StepCost) -> str:
    """Returns what simulated lines are by."""
    if cost.estimated:
        return f"SIMULATED with an ESTIMATED cost model, nothing measured: {cost.device}"
    return f"SIMULATED with a cost model measured on {cost.device}"


def replayed_label(replay: Replay) -> str:
    """Returns what replayed points are of."""
    return (
        f"REPLAYED, every micro-batch of each cluster computed on one {replay.measured_on.device}, no network: bars: "
        "95 %"
    )


def measured_label(measured: MeasuredComparison) -> str:
    """Returns what the measured point is of."""
    run = measured.run
    device = f"{run.ranks} x {run.device or 'device not recorded'}"
    name = f"MEASURED: {run.label} ({run.layout or 'layout not recorded'}) on {device}"
    if measured.speed_up is None or measured.speed_up_interval is None:
        return f"{name}; no speed-up without a baseline"
    if not measured.is_over_padding:
        return f"{name}; its speed-up is not over padding and not drawn"
    over = "--padded-baseline" if measured.baseline is None else measured.baseline.label
    return f"{name}: {measured.speed_up:.2f} times {over}; bar: 95 %"


def caption(study: ImbalanceStudy) -> list[str]:
    """Returns the lines below the figure: what was simulated, and the warnings that belong to it."""
    simulation = study.simulation
    options = simulation.options
    return [
        f"{options.batch} sequences or {simulation.packs_per_micro_batch} packs of {simulation.pack_length:,} slots "
        f"per micro-batch, {options.accumulation} per step and device; {options.steps:,} simulated steps: means have "
        f"an error of ± {_widest(simulation.rows):.3f} (95 %). Bands of thick lines: nine of ten simulated steps.",
        f"Cost model: {simulation.cost.origin}.",
        *([] if study.replay is None else [_replayed_steps(study.replay)]),
        *([] if study.forecast is None else [_MEAN_STEP]),
        *(f"WARNING: {warning}." for warning in study.warnings),
    ]


def _replayed_steps(replay: Replay) -> str:
    steps = ", ".join(f"{row.steps:,} on {row.devices:,}" for row in replay.of(BASELINE))
    return f"Replayed steps: {steps} devices; update {1e3 * replay.update_seconds:.3g} ms as on one device."


def _widest(rows: Sequence[SchemeRow]) -> float:
    """Returns half the width of the widest interval."""
    return max((row.speed_up_high - row.speed_up_low) / 2 for row in rows)


def plot_imbalance(study: ImbalanceStudy, path: Path) -> None:
    """Draws the speed-up over padding, the fraction of time spent waiting, and what each scheme needs.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=9.5, height=13.5) as figure:
        places = {"hspace": 0.36, "left": 0.08, "right": 0.72, "height_ratios": (1, 1, 0.5)}
        above, middle, below = figure.subplots(3, 1, gridspec_kw=places)
        _draw_speed_ups(above, study)
        _draw_waiting(middle, study)
        _draw_needs(below)
        figure.legend(handles=legend(study), loc="lower left", bbox_to_anchor=(0.02, 0.93), frameon=False, fontsize=9.5)
        write_footer(figure, [*caption(study), *study.footer])


def _draw_speed_ups(axes: Any, study: ImbalanceStudy) -> None:
    ends = []
    for scheme in SCHEMES:
        rows = study.simulation.of(scheme)
        if scheme in _BANDS:
            draw_band(axes, rows, x=_DEVICES, low=_STEP_LOW, high=_STEP_HIGH, color=colour(scheme), alpha=0.13)
        last = _draw_line(axes, rows, scheme, _SPEED_UP, is_hollow=study.simulation.cost.estimated)
        ends.append((f"{_name(scheme)} {last:.2f}", last, colour(scheme)))
    if study.reference is not None:
        ends.append(_draw_reference(axes, study.reference))
    if study.forecast is not None:
        ends.append(_draw_forecast(axes, study.forecast))
    if study.replay is not None:
        for scheme in REPLAYED:
            style = {"color": colour(scheme), **_REPLAYED, "capsize": 4, "elinewidth": 1.6}
            at = _beside_others(scheme, study)
            draw_series(axes, study.replay.of(scheme), x=at, y=_SPEED_UP, low=_LOW, high=_HIGH, **style)
    _draw_measured_speed_up(axes, study.measured)
    _device_axis(axes, study)
    label_ends(axes, ends)
    write_title(axes, _finding(study.simulation if study.replay is None else study.replay, _kind(study)))


def _draw_waiting(axes: Any, study: ImbalanceStudy) -> None:
    ends = []
    simulation = study.simulation
    schemes = [scheme for scheme in SCHEMES if scheme != DENSE_PACKS]
    for scheme in schemes:
        rows = simulation.of(scheme)
        last = _draw_line(axes, rows, scheme, _WAITING, is_hollow=simulation.cost.estimated)
        ends.append((f"{_name(scheme)} {100 * rows[-1].wait_share:.2g} %", last, colour(scheme)))
    if study.measured is not None and study.measured.run.wait_share is not None:
        draw_series(axes, [study.measured.run], x=_RANKS, y=_WAITING, **MEASURED)
    _device_axis(axes, study)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_SHARE, 100)
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01 or less", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    label_ends(axes, ends)
    if study.replay is not None:
        for scheme in REPLAYED:
            at = _beside_others(scheme, study)
            draw_series(axes, study.replay.of(scheme), x=at, y=_WAITING, color=colour(scheme), **_REPLAYED)
    first = simulation if study.replay is None else study.replay
    arrival, packs = (first.of(scheme)[-1] for scheme in (UNPADDED_ARRIVAL, BALANCED_PACKS))
    write_title(
        axes,
        f"{_kind(study)}: {counted(arrival.devices, 'device')} wait {100 * arrival.wait_share:.2g} % of their time\n"
        f"un-padded by arrival, {100 * packs.wait_share:.2g} % on packs assigned by cost",
    )


def _draw_needs(axes: Any) -> None:
    """Writes a table of what each scheme needs, each in the colour of its line; what is not needed is faint."""
    axes.axis("off")
    write_title(axes, "What each needs")
    for row, line in enumerate([{column.heading: column.heading for column in _NEEDS[1:]}, *cells(SCHEMES, _NEEDS)]):
        height = 1 - row / len(SCHEMES)
        style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 9.5, "va": "center"}
        if row:
            scheme = SCHEMES[row - 1]
            axes.text(0.0, height, _name(scheme), color=colour(scheme), fontweight="bold", **style)
        for place, column in zip(_NEEDS_AT, _NEEDS[1:], strict=True):
            word = line[column.heading]
            axes.text(place, height, word, alpha=0.4 if word in ("no", "fixed") else 1.0, **style)


def _draw_line(axes: Any, rows: Sequence[SchemeRow], scheme: Scheme, value: Column, *, is_hollow: bool) -> float:
    """Draws simulated rows as a line; returns its last height."""
    thick = scheme in (BALANCED_PACKS, UNPADDED_ARRIVAL)
    style: dict[str, Any] = {
        "color": colour(scheme),
        "linewidth": 2.6 if thick else 1.5,
        "linestyle": (0, (5, 2)) if scheme == DENSE_PACKS else "-",
        "marker": "o",
        "markersize": 6 if thick else 4,
        "markerfacecolor": "white" if is_hollow else colour(scheme),
        "zorder": 3 if thick else 2,
    }
    return draw_series(axes, rows, x=_DEVICES, y=value, **style)[-1]


def _draw_reference(axes: Any, reference: ReferenceCurve) -> tuple[str, float, str]:
    """Draws the published curve, and the range of nine of ten steps of its law."""
    devices = np.array([row.devices for row in reference.rows])
    axes.fill_between(
        devices,
        *(reference.single.at_hazard(-np.log1p(-percentile / 100) / devices) for percentile in STEPS_WITHIN),
        color=PUBLISHED,
        alpha=0.07,
        linewidth=0,
    )
    *_, last = draw_series(axes, reference.rows, x=_DEVICES, y=replace(_SPEED_UP, value="expected"), **_PUBLISHED_STYLE)
    return f"{reference.name} {last:.2f}", last, PUBLISHED


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
    axes.plot(devices, drawn, **_LOG_STYLE)
    axes.set_ylim(min(bottom, 0.97 * low.min()), top)
    last = float(forecast.rows[-1].best.expected)
    return f"from measured steps {last:.2f}", top if expected[-1] >= top else last, LOG


def _draw_measured_speed_up(axes: Any, measured: MeasuredComparison | None) -> None:
    if measured is not None and measured.is_over_padding:
        ranks = replace(_DEVICES, value="run.ranks")
        low, high = (Column(end, f"speed_up_interval.{end}") for end in ("low", "high"))
        draw_series(axes, [measured], x=ranks, y=_SPEED_UP, low=low, high=high, capsize=5, elinewidth=1.8, **MEASURED)


def _beside_others(scheme: Scheme, study: ImbalanceStudy) -> Column:
    """Returns the number of devices, moved so that the marks of replayed schemes stand side by side."""
    doublings = np.log2(max(row.devices for row in study.simulation.rows))
    moved = _MARK_WIDTH * doublings * (REPLAYED.index(scheme) - (len(REPLAYED) - 1) / 2)
    return replace(_DEVICES, value=lambda row: row.devices * 2**moved)


def _device_axis(axes: Any, study: ImbalanceStudy) -> None:
    counts = {row.devices for row in study.simulation.of(BASELINE)}
    devices = sorted(counts if study.measured is None else counts | {study.measured.run.ranks})
    logarithmic_counts(axes, devices, label=_DEVICES.label)


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
        return f"{begin} {counted(last.devices, 'device')},\npacks assigned by cost {packs.speed_up:.2f} times"
    return (
        f"{begin} {counted(first.devices, 'device')}\n"
        f"and {last.speed_up:.2f} times on {counted(last.devices, 'device')}, packs assigned by cost "
        f"{packs.speed_up:.2f} times there"
    )


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
            _draw_histogram(axes, histogram, of=of, is_measured=is_measured, law=law)
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


def _draw_histogram(axes: Any, histogram: StepHistogram, *, of: str, is_measured: bool, law: str) -> None:
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
    write_title(axes, _histogram_finding(histogram, of=of))


def _histogram_finding(histogram: StepHistogram, *, of: str) -> str:
    begin = f"{of}, {counted(histogram.devices, 'device')}\n{histogram.speed_up:.3f} times padding's speed; "
    if histogram.fitted_distance is None:
        return f"{begin}all steps are equally fast"
    return f"{begin}Gumbel off by up to {100 * histogram.fitted_distance:.1f} %"


def _draw_law(axes: Any, law: Gumbel, label: str, line_colour: str, style: Any) -> None:
    low, high = law.frozen.ppf([_TAIL, 1 - _TAIL]).tolist()
    speed_ups = np.linspace(low, high, _CURVE_POINTS)
    axes.plot(speed_ups, law.frozen.pdf(speed_ups), color=line_colour, linewidth=2.0, linestyle=style, label=label)


def _parameters(law: Gumbel) -> str:
    return f"location {law.location:.3f}, scale {law.scale:.3f}"
