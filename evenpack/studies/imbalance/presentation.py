"""The tables and figures of `evenpack study imbalance`: figures 5 and 6 of PackedBERT for any lengths.

In tables a line is a layout and policy, and a column a number of devices. In figures marks tell apart what was measured
(filled diamonds), what was replayed on one device (triangles), what is simulated (circles, hollow where the cost model
is an estimate), and what is published (dots without marks).
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.columns import Cells, Column, cells, cells_across, cells_by_column
from evenpack.studies.imbalance.cluster import BALANCED_PACKS, BASELINE, DENSE_PACKS, SCHEMES, UNPADDED_ARRIVAL, Scheme
from evenpack.studies.imbalance.extrapolation import PublishedCurve
from evenpack.studies.imbalance.measurement import MeasuredComparison
from evenpack.studies.imbalance.regimes import ForecastRow, Regime, RegimeForecast
from evenpack.studies.imbalance.replay import Replay
from evenpack.studies.imbalance.simulation import SchemeRow, Simulation
from evenpack.studies.imbalance.study import ImbalanceStudy, StepOfRun
from evenpack.studies.plotting import (
    INK,
    draw_series,
    figure_as_png,
    label_ends,
    logarithmic_counts,
    write_footer,
    write_title,
)
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
)
"""Results that have a table of their own each, whose title is the heading."""
_INFERENCES = (Column("one device's, by median and mode (published)", "expected", ".3f"),)
_LOGGED_STEPS = (
    Column("name", "label"),
    Column("layout", missing="not recorded"),
    Column("steps", "steps_used", ","),
    Column("sequences/s", "sequences_per_second", ",.4g"),
    Column("95 %", "interval", ",.4g"),
    Column("waiting", "wait_share", ".2%"),
    Column("commit"),
)
_LIMITS = (
    Column("lowest, with 95 % intervals", "lowest", ".3f"),
    Column("highest, with 95 % intervals", "highest", ".3f"),
    Column("extrapolated"),
)


def imbalance_tables(study: ImbalanceStudy) -> list[RenderableType]:
    """Returns all tables."""
    shown: list[RenderableType] = [] if study.replay is None else _replay_tables(study.replay)
    shown += [_setting_table(study), _speed_up_table(study)]
    shown += [
        WideTable(rows=_scheme_rows(study.simulation, SCHEMES, column), title=column.heading)
        for column in _OF_EACH_SCHEME
    ]
    if study.reference is not None:
        shown += _reference_tables(study.reference)
    if study.measured is not None:
        shown += _measured_tables(study.measured)
    if study.regimes is not None:
        shown += _regime_tables(study.regimes, study.measured)
    warnings = [*study.warnings, *(() if study.regimes is None else study.regimes.warnings)]
    lines = [*study.notes, *(f"warning: {warning}" for warning in dict.fromkeys(warnings))]
    return [*shown, console.text("\n".join(lines))] if lines else shown


def _setting_table(study: ImbalanceStudy) -> RenderableType:
    simulation = study.simulation
    options = simulation.options
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
            if simulation.cost.causal
            else "bidirectional: a padded row costs length² + padding²",
            "steps": f"{options.steps:,} of each cluster, seed {options.seed}",
        },
        title=f"Clusters on {study.subject.origin}",
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
        rows.append({"": f"{PUBLISHED_NAME}: unpadded arrival, mean step", **published, "95 %, widest": "not known"})
    if study.regimes is not None and study.measured is not None and study.measured.is_over_padding:
        forecast = study.regimes.rows
        logged = {f"{row.devices:,}": f"{row.best.expected:.3f}" for row in forecast}
        width = max(((row.highest - row.lowest) / 2 for row in forecast), default=0.0)
        name = f"estimated from {study.measured.run.label}, mean step"
        rows.append({"": name, **logged, "95 %, widest": f"± {width:.2f}, all laws"})
    simulated = "ESTIMATED" if study.simulation.cost.estimated else "simulated"
    return WideTable(
        rows=rows, title=f"Speed-up over padding by arrival (sequences/s of a long run), {simulated}, by devices"
    )


def _replay_tables(replay: Replay) -> list[RenderableType]:
    """Returns what was replayed: the speed-up with its interval, and the waiting."""
    facts = pairs(
        {
            "device": replay.described(),
            "each device": f"{replay.accumulation} micro-batch{'es' if replay.accumulation > 1 else ''} of "
            f"{replay.batch} sequences, or {replay.packs} packs; ZeRO {replay.zero_stage}",
            "steps": _replayed(replay),
            "timed": f"{replay.timed_parts:,} parts of steps; no network",
        },
        title="Replayed on one device: every micro-batch of each cluster, one after another",
    )
    speed_ups = _scheme_rows(replay, replay.schemes, _SPEED_UP_WITH_INTERVAL)
    waits = _scheme_rows(replay, replay.schemes, _WAIT_SHARE)
    return [
        facts,
        WideTable(rows=speed_ups, title="Speed-up over padding by arrival (95 %), REPLAYED, by devices"),
        WideTable(rows=waits, title=f"{_WAIT_SHARE.heading}, REPLAYED"),
    ]


def _replayed(replay: Replay) -> str:
    steps = ", ".join(f"{row.steps:,} on {row.devices:,}" for row in replay.of(BASELINE))
    return f"{steps} devices; update {1e3 * replay.update_seconds:.3g} ms as on one device"


def _scheme_rows(source: Simulation | Replay, schemes: Sequence[Scheme], value: Column) -> Cells:
    return cells_across({scheme.label: source.of(scheme) for scheme in schemes}, heading=_DEVICE_COUNT, value=value)


def _reference_tables(reference: PublishedCurve) -> list[RenderableType]:
    rows = cells_by_column(reference.rows, _INFERENCES, heading=_DEVICE_COUNT)
    facts = pairs(
        {
            "8 devices": f"Gumbel of location {reference.fitted.location:.4f}, scale {reference.fitted.scale:.4f}: "
            f"mean {reference.fitted_mean:.4f}",
            "one device": f"location {reference.single.location:.4f}, scale {reference.single.scale:.4f}",
            "error of the inference": f"predicts {reference.expected_at_fitted:.4f} at 8 devices: "
            f"{reference.expected_at_fitted - reference.fitted_mean:+.4f}",
        },
        title=f"{PUBLISHED_NAME}, inferred from 8 devices: un-padding by arrival (PackedBERT, section E)",
    )
    return [facts, WideTable(rows=rows, title="By the law of")]


def _measured_tables(measured: MeasuredComparison) -> list[RenderableType]:
    """Returns the measured rates, the speed-up, and what was left out of the logs."""
    sides = [measured.run] if measured.baseline is None else [measured.run, measured.baseline]
    ranks = measured.run.ranks
    rows = [{"": name} | line for name, line in zip(("run", "baseline"), cells(sides, _LOGGED_STEPS), strict=False)]
    device = measured.run.device or "device not recorded"
    shown: list[RenderableType] = [table(rows, title=f"Measured on {ranks} x {device}")]
    if measured.baseline is not None:
        shown.append(
            pairs(
                {
                    "over": f"{measured.baseline.label}: {measured.baseline.layout or 'layout not recorded'}",
                    "measured": f"{measured.speed_up:.3f} (95 %: {measured.speed_up_interval:.3f})",
                },
                title=f"Speed-up of {measured.run.label} on {ranks} devices",
            )
        )
    lines = []
    for side in sides:
        used = f"{side.steps_used:,} of {side.steps_read:,} steps used"
        lines += [
            f"{side.path}: {side.format}; {used}",
            *(f"cut {counted(steps, 'step')}: {reason}" for reason, steps in side.cuts.items()),
        ]
    return [*shown, console.text("\n".join(lines))]


def _by_method(rows: Sequence[ForecastRow], best: str, measured: MeasuredComparison | None) -> RenderableType:
    """Returns the forecast by every method, and the range over all of them with their intervals."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        for estimate in row.estimates:
            name = f"{estimate.method.replace('_', ' ')}{' (lowest AIC)' if estimate.method == best else ''}"
            lines.setdefault(name, {"": name})[f"{row.devices:,}"] = f"{estimate.expected:.3f}"
    limits = cells_by_column(rows, _LIMITS, heading=_DEVICE_COUNT)
    is_speed_up = measured is not None and measured.is_over_padding
    what = "speed-up" if is_speed_up else "rate per device, relative to the log's,"
    return WideTable(rows=[*lines.values(), *limits], title=f"Estimated from measured steps: {what} by each method")


def _regime_tables(forecast: RegimeForecast, measured: MeasuredComparison | None) -> list[RenderableType]:
    regimes = forecast.regimes
    steps = sum(regime.steps for regime in regimes)
    left_out = sum(regime.hiccups for regime in regimes), sum(regime.short_steps for regime in regimes)
    lost = sum(regime.hiccup_seconds for regime in regimes) / len(regimes)
    normal_wins = sum(regime.gumbel_excess_aic > 0 for regime in regimes)
    length = "where the level changes" if forecast.regime_steps is None else f"every {forecast.regime_steps:,} steps"
    in_run = forecast.share_between_in_run
    between: dict[str, str] = {}
    resampled = "blocks of its steps resampled"
    if len(regimes) > 1:
        resampled = "runs and regimes resampled"
        between = {
            "deviation between": f"{forecast.between:.4f} of the mean rate, levels of all runs",
            "variance between": f"{forecast.share_between:.3f} of all, runs pooled; "
            + ("no run has two regimes" if in_run is None else f"{in_run:.3f} within a run"),
            "a run is worth": f"{forecast.effective_values:.3g} independent values"
            + (
                ""
                if forecast.run_deviation is None
                else f"; means of runs deviate by {percent(forecast.run_deviation)}"
            ),
        }
    facts = pairs(
        {
            "regimes": f"{len(regimes)} of {counted(forecast.runs, 'run')}, {length}",
            "steps used": f"{steps:,}; {left_out[0]:,} hiccups, which cost {percent(lost)} of the time, and "
            f"{left_out[1]:,} short steps left out: 5 spreads from their regime's median",
            "deviation within": f"{forecast.within:.4f} of the mean rate; correlation of neighbouring steps "
            f"{sum(regime.autocorrelation for regime in regimes) / len(regimes):+.3f}",
            **between,
            "law of the rate": f"normal in {normal_wins} of {len(regimes)} regimes, else Gumbel (AIC); distances, "
            f"mean: {_mean(regimes, 'normal_distance'):.3f} and {_mean(regimes, 'gumbel_distance'):.3f}",
        },
        title=f"Regimes of the measured steps on {forecast.log_devices} devices (95 %: {resampled})",
    )
    return [facts, _by_method(forecast.rows, forecast.law, measured)]


def _mean(regimes: Sequence[Regime], name: str) -> float:
    return float(np.mean([getattr(regime, name) for regime in regimes]))


_SHADES = {
    "packed": ("#38bdf8", "#6b8af7", "#1e40af"),
    "unpadded": ("#c2410c", "#eab308", "#78350f", "#fb923c"),
    "padded": ("#7b8794", "#047857", "#84cc16"),
}

PUBLISHED_NAME = "published (BERT, 512)"

_MEASURED: dict[str, Any] = {
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
_PUBLISHED_STYLE: dict[str, Any] = {"color": INK, "linewidth": 1.6, "linestyle": (0, (1, 1.5))}
_LEGEND_CHARACTERS = 120
"""Characters of a legend's line."""
_DEVICES = Column("devices", axis="devices (logarithmic)")
_SPEED_UP = Column("speed-up", "speed_up", axis="speed-up over padding by arrival (ratio of sequences/s)")
_LOW, _HIGH = Column("low", "speed_up_low"), Column("high", "speed_up_high")
_MARK_WIDTH = 0.018
"""Width of a replayed mark, as a fraction of the axis."""


def colour(scheme: Scheme) -> str:
    """Returns one hue per layout."""
    same = [one for one in SCHEMES if one.layout == scheme.layout]
    return _SHADES[scheme.layout][same.index(scheme)]


def _kinds_of_evidence(study: ImbalanceStudy) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what each kind of mark in the figure is of, with its style."""
    cost, replay, measured = study.simulation.cost, study.replay, study.measured
    simulated = f"SIMULATED with a cost model measured on {cost.device}"
    if cost.estimated:
        simulated = f"SIMULATED with an ESTIMATED cost model, nothing measured: {cost.device}"
    face = "white" if cost.estimated else INK
    yield simulated, {"color": INK, "marker": "o", "markersize": 6, "markerfacecolor": face}
    if replay is not None:
        device = replay.measured_on.device
        replayed = f"REPLAYED, every micro-batch of each cluster computed on one {device}, no network: bars: 95 %"
        yield replayed, {"color": INK, "marker": "^", "markersize": 8, "linestyle": "none"}
    if measured is not None:
        run = measured.run
        name = f"MEASURED: {run.label} ({run.layout or 'layout not recorded'}) on {run.ranks} x "
        name += run.device or "device not recorded"
        if measured.baseline is None:
            name += "; no speed-up without a baseline"
        elif not measured.is_over_padding:
            name += "; its speed-up is not over padding and not drawn"
        else:
            name += f": {measured.speed_up:.2f} times {measured.baseline.label}; bar: 95 %"
        yield name, _MEASURED
    if study.reference is not None:
        yield (
            f"{PUBLISHED_NAME}: un-padding by arrival, ESTIMATED from 8 GPUs (PackedBERT, section E)",
            _PUBLISHED_STYLE,
        )


def caption(study: ImbalanceStudy) -> list[str]:
    """Returns the lines below the figure: what was simulated, and the warnings that belong to it."""
    simulation = study.simulation
    options = simulation.options
    return [
        f"{options.batch} sequences or {simulation.packs_per_micro_batch} packs of {simulation.pack_length:,} slots "
        f"per micro-batch, {options.accumulation} per step and device; {options.steps:,} simulated steps: means have "
        f"an error of ± {_widest(simulation.rows):.3f} (95 %).",
        f"Cost model: {simulation.cost.origin}.",
        *([] if study.replay is None else [f"Replayed steps: {_replayed(study.replay)}."]),
        *(f"WARNING: {warning}." for warning in study.warnings),
    ]


def _widest(rows: Sequence[SchemeRow]) -> float:
    """Returns half the width of the widest interval."""
    return max((row.speed_up_high - row.speed_up_low) / 2 for row in rows)


def plot_imbalance(study: ImbalanceStudy, path: Path) -> None:
    """Draws the speed-up over padding by number of devices.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=9.8, height=5.8) as figure:
        from matplotlib.lines import Line2D

        _draw_speed_ups(figure.subplots(), study)
        kinds = [
            Line2D([], [], label=textwrap.fill(name, _LEGEND_CHARACTERS), **style)
            for name, style in _kinds_of_evidence(study)
        ]
        figure.legend(handles=kinds, loc="outside upper left", frameon=False, fontsize=9.5)
        write_footer(figure, [*caption(study), *study.footer])


def _draw_speed_ups(axes: Any, study: ImbalanceStudy) -> None:
    simulation, replay, measured = study.simulation, study.replay, study.measured
    for scheme in SCHEMES:
        rows, hue, is_thick = simulation.of(scheme), colour(scheme), scheme in (BALANCED_PACKS, UNPADDED_ARRIVAL)
        style: dict[str, Any] = {
            "label": f"{_name(scheme)} {rows[-1].speed_up:.2f}",
            "color": hue,
            "linewidth": 2.6 if is_thick else 1.5,
            "linestyle": (0, (5, 2)) if scheme == DENSE_PACKS else "-",
            "marker": "o",
            "markersize": 6 if is_thick else 4,
            "markerfacecolor": "white" if simulation.cost.estimated else hue,
            "zorder": 3 if is_thick else 2,
        }
        draw_series(axes, rows, x=_DEVICES, y=_SPEED_UP, **style)
    if study.reference is not None:
        curve, y = study.reference.rows, replace(_SPEED_UP, value="expected")
        name = f"{PUBLISHED_NAME} {curve[-1].expected:.2f}"
        draw_series(axes, curve, x=_DEVICES, y=y, label=name, **_PUBLISHED_STYLE)
    devices = {row.devices for row in simulation.of(BASELINE)}
    replayed = {} if replay is None else {scheme: replay.of(scheme) for scheme in replay.schemes}
    for place, (scheme, rows) in enumerate(replayed.items()):  # whose marks stand side by side
        moved = 2 ** (_MARK_WIDTH * np.log2(max(devices)) * (place - (len(replayed) - 1) / 2))
        at = replace(_DEVICES, value=partial(_moved, by=moved))
        style = {**_REPLAYED, "color": colour(scheme), "capsize": 4, "elinewidth": 1.6}
        draw_series(axes, rows, x=at, y=_SPEED_UP, low=_LOW, high=_HIGH, **style)
    if measured is not None and measured.is_over_padding:
        ranks = replace(_DEVICES, value="run.ranks")
        low, high = (Column(end, f"speed_up_interval.{end}") for end in ("low", "high"))
        draw_series(axes, [measured], x=ranks, y=_SPEED_UP, low=low, high=high, capsize=5, elinewidth=1.8, **_MEASURED)
    logarithmic_counts(axes, sorted(devices | ({measured.run.ranks} if measured else set())), label=_DEVICES.label)
    label_ends(axes)
    write_title(axes, f"Packs, un-padding and padding on {study.subject.origin}")


def _moved(row: SchemeRow, *, by: float) -> float:
    return row.devices * by


def _name(scheme: Scheme) -> str:
    if scheme == DENSE_PACKS:
        return "packed, dense attention"
    return "padded arrival: the baseline" if scheme == BASELINE else scheme.label.replace("_", " ")
