"""What was measured, as tables, and what follows from it for other numbers of devices."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.console import WideTable, pairs, percent, table
from evenpack.studies.imbalance.extrapolated.forecast import LogForecast
from evenpack.studies.imbalance.measured.measurement import Measured, MeasuredSteps
from evenpack.studies.imbalance.measured.step_log import Cut
from evenpack.studies.imbalance.simulated.cluster import BASELINE
from evenpack.studies.imbalance.simulated.simulation import Simulation


def measured_tables(measured: Measured, simulation: Simulation) -> list[RenderableType]:
    """Returns the measured rates, the speed-up beside the simulated one, and what was left out of the logs."""
    sides = [measured.run] if measured.baseline is None else [measured.run, measured.baseline]
    ranks = measured.run.ranks
    rows = [_side(name, side) for name, side in zip(("run", "baseline"), sides, strict=False)]
    device = measured.run.device or "device not recorded"
    shown: list[RenderableType] = [table(rows, title=f"Measured on {ranks} x {device}")]
    if measured.speed_up is not None and measured.speed_up_interval is not None:
        reach = measured.speed_up_interval
        shown.append(
            pairs(
                {
                    "over": _over(measured),
                    "measured": f"{measured.speed_up:.3f} (95 %: {reach.low:.3f} to {reach.high:.3f})",
                    f"simulated, {'ESTIMATED' if simulation.cost.estimated else 'measured'} cost model": _simulated(
                        measured, simulation
                    ),
                },
                title=f"Speed-up of {measured.run.label} on {ranks} devices",
            )
        )
    return [*shown, console.text("\n".join(line for side in sides for line in log_lines(side)))]


def log_lines(side: MeasuredSteps) -> list[str]:
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
        lines.append(f"cut {steps:,} {'step' if steps == 1 else 'steps'}{places}, {where}: {reason}")
    return lines


def forecast_tables(forecast: LogForecast) -> list[RenderableType]:
    """Returns the laws that were fitted to the measured steps, and what follows for other numbers of devices."""
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
    title = (
        f"Laws of the measured steps: speed-up over {forecast.padded_baseline:,.4g} sequences/s on "
        f"{forecast.log_devices} devices"
    )
    return [table(fits, title=title), _forecast_table(forecast)]


def _side(name: str, side: MeasuredSteps) -> dict[str, Any]:
    return {
        "": name,
        "name": side.label,
        "layout": side.layout or "not recorded",
        "steps": f"{side.steps_used:,}",
        "sequences/s": f"{side.sequences_per_second:,.4g}",
        "95 %": f"{side.interval.low:,.4g} to {side.interval.high:,.4g}",
        "waiting": None if side.wait_share is None else percent(side.wait_share),
        "commit": side.commit,
    }


def _over(measured: Measured) -> str:
    if measured.baseline is None:
        return f"{measured.padded_baseline:,.4g} sequences/s (--padded-baseline)"
    return f"{measured.baseline.label}: {measured.baseline.layout or 'layout not recorded'}"


def _simulated(measured: Measured, simulation: Simulation) -> str:
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
    return WideTable(rows=list(cells.values()), title="Estimated from measured steps: speed-up by each method")
