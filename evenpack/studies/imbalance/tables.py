"""The tables of `evenpack study imbalance`: a line for each layout and policy, a column for each number of devices."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.columns import Cells, Column, cells, cells_across, cells_by_column, table_of
from evenpack.studies.imbalance.cluster import BALANCED_PACKS, BASELINE, SCHEMES, UNPADDED_BALANCED, Scheme
from evenpack.studies.imbalance.extrapolation import LogForecast, ReferenceCurve
from evenpack.studies.imbalance.logs import Cut
from evenpack.studies.imbalance.measurement import MeasuredComparison, MeasuredSteps
from evenpack.studies.imbalance.replay import REPLAYED, Replay, SlowestRow
from evenpack.studies.imbalance.simulation import Simulation
from evenpack.studies.imbalance.study import ImbalanceStudy, StepOfRun
from evenpack.units import counted

_DEVICES = Column("devices", form=",")
_SPEED_UP = Column("speed-up", "speed_up", ".3f")
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
            f"{options.zero_stage}: devices wait "
            + ("in every micro-batch" if options.zero_stage >= 2 else "once a step"),
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
    rows = _scheme_rows(study.simulation, SCHEMES, _SPEED_UP)
    for scheme, line in zip(SCHEMES, rows, strict=True):
        of_scheme = study.simulation.of(scheme)
        line["95 %, widest"] = f"± {max((row.speed_up_high - row.speed_up_low) / 2 for row in of_scheme):.4f}"
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
    return cells_across({scheme.label: source.of(scheme) for scheme in schemes}, heading=_DEVICES, value=value)


def _reference_tables(reference: ReferenceCurve) -> list[RenderableType]:
    rows = cells_by_column(reference.rows, _INFERENCES, heading=_DEVICES)
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
    """Returns the laws that were fitted to the measured steps, and what follows for other numbers of devices."""
    title = (
        f"Laws of the measured steps: speed-up over {forecast.padded_baseline:,.4g} sequences/s on "
        f"{forecast.log_devices} devices"
    )
    return [table_of(forecast.fits.fits, _FITS, title=title), _forecast_table(forecast)]


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


def _forecast_table(forecast: LogForecast) -> RenderableType:
    """Returns every method, and the range over all of them with their intervals."""
    best = forecast.fits.best.name
    lines: dict[str, dict[str, Any]] = {}
    for row in forecast.rows:
        for estimate in row.estimates:
            name = f"{estimate.method.replace('_', ' ')}{' (lowest AIC)' if estimate.method == best else ''}"
            lines.setdefault(name, {"": name})[f"{row.devices:,}"] = f"{estimate.expected:.3f}"
    limits = cells_by_column(forecast.rows, _LIMITS, heading=_DEVICES)
    return WideTable(rows=[*lines.values(), *limits], title="Estimated from measured steps: speed-up by each method")
