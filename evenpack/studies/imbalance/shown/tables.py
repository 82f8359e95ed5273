"""The tables of `evenpack study imbalance`: a line for each layout and policy, a column for each number of devices."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.imbalance.extrapolated.reference import ReferenceCurve
from evenpack.studies.imbalance.measured.replay import REPLAYED, Replay
from evenpack.studies.imbalance.results import ImbalanceStudy
from evenpack.studies.imbalance.run_settings import StepOfRun
from evenpack.studies.imbalance.shown.measured_tables import forecast_tables, measured_tables
from evenpack.studies.imbalance.simulated.cluster import BASELINE, SCHEMES, Scheme
from evenpack.studies.imbalance.simulated.crossings import Crossing
from evenpack.studies.imbalance.simulated.simulation import Simulation
from evenpack.studies.imbalance.simulated.step_times import SchemeRow


def imbalance_tables(study: ImbalanceStudy) -> list[RenderableType]:
    """Returns all tables."""
    shown: list[RenderableType] = [] if study.replay is None else _replay_tables(study.replay)
    shown += [_setting_table(study), _speed_up_table(study)]
    for title, value in (
        ("Fraction of the devices' time spent waiting for the slowest", lambda row: f"{100 * row.wait_share:.2f} %"),
        ("Slowest device over the mean one, mean over steps", lambda row: f"{row.slowest_over_mean:.4f}"),
        ("Efficiency: sequences/s per device, divided by that of one device", lambda row: f"{row.efficiency:.4f}"),
    ):
        shown.append(WideTable(rows=_scheme_rows(study.simulation, SCHEMES, value), title=title))
    shown.append(_crossing_table(study.simulation.crossings))
    if study.reference is not None:
        shown += _reference_tables(study.reference)
    if study.measured is not None:
        shown += measured_tables(study.measured, study.simulation)
    if study.forecast is not None:
        shown += forecast_tables(study.forecast)
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
            "noise": f"{percent(simulation.cost.noise)} of a micro-batch's seconds" if options.noise else "none",
            "steps": f"{options.steps:,} of each cluster, seed {options.seed}",
        },
        title=f"Clusters on {study.origin}",
    )


def _of_run(step: StepOfRun) -> str:
    items = f"{step.packs} packs" if step.packs is not None else f"{step.batch} sequences"
    if step.ranks is None:
        return f"{items} per micro-batch; it has not trained, so its ranks and its accumulation are not known"
    accumulation = "" if step.accumulation is None else f", {step.accumulation} to a step,"
    return f"{items} per micro-batch{accumulation} on its {step.ranks} ranks; ZeRO {step.zero_stage}"


def _speed_up_table(study: ImbalanceStudy) -> RenderableType:
    """Returns the speed-ups: simulated lines first, then what is published and what follows from measured steps."""
    rows = _scheme_rows(study.simulation, SCHEMES, lambda row: f"{row.speed_up:.3f}")
    for scheme, cells in zip(SCHEMES, rows, strict=True):
        of_scheme = study.simulation.of(scheme)
        cells["95 %, widest"] = f"± {max((row.speed_up_high - row.speed_up_low) / 2 for row in of_scheme):.4f}"
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
    speed_ups = _scheme_rows(
        replay, REPLAYED, lambda row: f"{row.speed_up:.3f} ({row.speed_up_low:.3f} to {row.speed_up_high:.3f})"
    )
    waits = _scheme_rows(replay, REPLAYED, lambda row: f"{100 * row.wait_share:.2f} %")
    return [
        facts,
        WideTable(rows=speed_ups, title="Speed-up over padding by arrival (95 %), REPLAYED, by devices"),
        WideTable(rows=waits, title="Fraction of the devices' time spent waiting for the slowest, REPLAYED"),
    ]


def _scheme_rows(
    source: Simulation | Replay, schemes: Sequence[Scheme], value: Callable[[SchemeRow], str]
) -> list[dict[str, Any]]:
    return [{"": scheme.label, **{f"{row.devices:,}": value(row) for row in source.of(scheme)}} for scheme in schemes]


def _crossing_table(crossings: Sequence[Crossing]) -> RenderableType:
    rows = [
        {
            "": f"{crossing.layout} {crossing.policy}",
            "against": crossing.against,
            "it": crossing.verdict,
            "between devices": None
            if crossing.last_before is None
            else f"{crossing.last_before:,} and {crossing.first_after:,}",
        }
        for crossing in crossings
    ]
    return table(rows, title="Comparison with packs, at the simulated numbers of devices (95 %)")


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
        title=f"Inferred from a cluster, {reference.name}: un-padding by arrival (PackedBERT, section E)",
    )
    return [facts, WideTable(rows=rows, title="One device's law by")]
