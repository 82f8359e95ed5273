"""The tables of `evenpack study imbalance`: a line for each layout and policy, a column for each number of devices."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.imbalance.cluster import SCHEMES
from evenpack.studies.imbalance.crossings import Crossing
from evenpack.studies.imbalance.forecast import LogForecast
from evenpack.studies.imbalance.plots import ImbalanceStudy, reference_name
from evenpack.studies.imbalance.reference import ReferenceCurve
from evenpack.studies.imbalance.simulation import Simulation
from evenpack.studies.imbalance.step_times import SimulationRow


def imbalance_tables(study: ImbalanceStudy) -> list[RenderableType]:
    """Returns all tables."""
    shown: list[RenderableType] = [_setting_table(study), _speed_up_table(study)]
    for title, value in (
        ("Fraction of the devices' time spent waiting for the slowest", lambda row: f"{100 * row.wait_share:.2f} %"),
        ("Slowest device over the mean one, mean over steps", lambda row: f"{row.slowest_over_mean:.4f}"),
        ("Efficiency: sequences/s per device, divided by that of one device", lambda row: f"{row.efficiency:.4f}"),
    ):
        shown.append(_scheme_table(study.simulation, value, title=title))
    shown += [_crossing_table(study.simulation.crossings), *_reference_tables(study.reference)]
    if study.forecast is not None:
        shown += _log_tables(study.forecast)
    return shown


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
            "step": f"{options.accumulation} micro-batches per device, ZeRO {options.zero_stage}: devices wait "
            + ("in every micro-batch" if options.zero_stage >= 2 else "once a step"),
            "cost model": f"{simulation.cost.name}: {simulation.cost.origin}",
            "attention": "causal: a padded row costs its width squared"
            if simulation.causal
            else "bidirectional: a padded row costs length² + padding²",
            "all-reduce": reduced,
            "noise": f"{percent(simulation.cost.noise)} of a micro-batch's seconds" if options.noise else "none",
            "steps": f"{options.steps:,} of each cluster, seed {options.seed}",
        },
        title=f"Clusters on {study.origin}",
    )


def _speed_up_table(study: ImbalanceStudy) -> RenderableType:
    """Returns the speed-ups: simulated lines first, then the published one and the log's."""
    rows = _scheme_rows(study.simulation, lambda row: f"{row.speed_up:.3f}")
    for scheme, cells in zip(SCHEMES, rows, strict=True):
        of_scheme = study.simulation.of(scheme)
        cells["95 %, widest"] = f"± {max((row.speed_up_high - row.speed_up_low) / 2 for row in of_scheme):.4f}"
    published = {f"{row.devices:,}": f"{row.expected:.3f}" for row in study.reference.rows}
    spread = max(row.spread for row in study.reference.rows)
    name = f"{reference_name(study.reference)}: unpadded arrival"
    rows.append({"": name, **published, "95 %, widest": f"laws differ by {spread:.2f}"})
    if study.forecast is not None:
        logged = {f"{row.devices:,}": f"{row.best.expected:.3f}" for row in study.forecast.rows}
        width = max((row.highest - row.lowest) / 2 for row in study.forecast.rows)
        rows.append({"": "log", **logged, "95 %, widest": f"± {width:.2f}, all laws"})
    return WideTable(rows=rows, title="Speed-up over padding by arrival (sequences/s), by number of devices")


def _scheme_table(simulation: Simulation, value: Callable[[SimulationRow], str], *, title: str) -> RenderableType:
    return WideTable(rows=_scheme_rows(simulation, value), title=title)


def _scheme_rows(simulation: Simulation, value: Callable[[SimulationRow], str]) -> list[dict[str, Any]]:
    return [
        {"": scheme.label, **{f"{row.devices:,}": value(row) for row in simulation.of(scheme)}} for scheme in SCHEMES
    ]


def _crossing_table(crossings: Sequence[Crossing]) -> RenderableType:
    rows = [
        {
            "": f"{crossing.layout} {crossing.policy}",
            "against": crossing.against,
            "it": crossing.verdict,
            "at devices": None if crossing.devices is None else f"{crossing.devices:.2f}",
            "95 %": None if crossing.low is None else f"{crossing.low:.2f} to {crossing.high:.2f}",
        }
        for crossing in crossings
    ]
    return table(rows, title="Comparison with packs")


def _reference_tables(reference: ReferenceCurve) -> list[RenderableType]:
    inferences = (
        ("median and mode (published)", "expected"),
        ("checked by Monte Carlo", "monte_carlo"),
        ("mean and deviation", "by_moments"),
        ("the cluster's own law", "direct"),
    )
    rows = [
        {"": name, **{f"{row.devices:,}": f"{getattr(row, field):.3f}" for row in reference.rows}}
        for name, field in inferences
    ]
    facts = pairs(
        {
            "cluster": f"{reference.devices} devices, Gumbel of location {reference.fitted.location:.4f}, scale "
            f"{reference.fitted.scale:.4f}: mean {reference.fitted_mean:.4f}",
            "one device": f"location {reference.single.location:.4f}, scale {reference.single.scale:.4f}",
            "error of the inference": f"predicts {reference.expected_at_fitted:.4f} at {reference.devices} devices: "
            f"{reference.model_error_at_fitted:+.4f}",
        },
        title=f"Inferred from a cluster, {reference_name(reference)}: un-padding by arrival (PackedBERT, section E)",
    )
    return [facts, WideTable(rows=rows, title="One device's law by")]


def _log_tables(forecast: LogForecast) -> list[RenderableType]:
    fits = [
        {
            "law": fit.name.replace("_", " "),
            "parameters": ", ".join(f"{name} {value:.4g}" for name, value in vars(fit.law).items()),
            "95 %": "; ".join(f"{each.low:.4g} to {each.high:.4g}" for each in fit.intervals.values()) or None,
            "AIC": f"{fit.aic:.1f}",
            "KS distance": f"{fit.ks_distance:.4f}",
            "p": None if fit.ks_p_value is None else f"{fit.ks_p_value:.3f}",
        }
        for fit in forecast.fits.fits
    ]
    lines = [f"{forecast.path}: {forecast.format}; {forecast.steps_used:,} of {forecast.steps_read:,} steps used"]
    lines += [
        f"cut {cut.steps:,} steps, lines {cut.first_line} to {cut.last_line}: {cut.reason}" for cut in forecast.cuts
    ]
    lines += [f"warning: {warning}" for warning in forecast.warnings]
    title = f"Log: speed-up over {forecast.padded_baseline:,.4g} sequences/s on {forecast.log_devices} devices"
    return [table(fits, title=title), _forecast_table(forecast), console.text("\n".join(lines))]


def _forecast_table(forecast: LogForecast) -> RenderableType:
    """Returns every method, and the range over all of them with their intervals."""
    best = forecast.fits.best.name
    cells: dict[str, dict[str, Any]] = {}
    for row in forecast.rows:
        devices = f"{row.devices:,}"
        for estimate in row.estimates:
            name = f"{estimate.method.replace('_', ' ')}{' (lowest AIC)' if estimate.method == best else ''}"
            cells.setdefault(name, {"": name})[devices] = f"{estimate.expected:.3f}"
    for name in ("lowest", "highest"):
        limits = {f"{row.devices:,}": f"{getattr(row, name):.3f}" for row in forecast.rows}
        cells[name] = {"": f"{name}, with 95 % intervals", **limits}
    told = {f"{row.devices:,}": row.extrapolated for row in forecast.rows}
    cells["extrapolated"] = {"": "extrapolated", **told}
    return WideTable(rows=list(cells.values()), title="From the log: expected speed-up by each law and method")
