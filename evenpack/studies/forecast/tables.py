"""`evenpack study forecast` as tables."""

from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.forecast.forecast import METHODS, ForecastStudy, FormForecast, RanksRow
from evenpack.studies.forecast.logged_ranks import LoggedRanks
from evenpack.studies.throughput.tables import cost_model_table

AIM = 0.10
"""Largest error of an acceptable forecast."""


def forecast_tables(study: ForecastStudy, logged: LoggedRanks | None) -> list[RenderableType]:
    """Returns a table for each form, the cost model, and the comparison with a real run."""
    origin, options = study.measured_on, study.options
    shown: list[RenderableType] = [
        console.text(
            f"{study.run}: {origin.model} ({origin.layers} layers of {origin.hidden_size}) on {origin.device}\n"
            f"{origin.precision}; {study.rows_per_rank} rows per rank; forecasts from {options.fit_steps} steps of one "
            f"rank, compared with {options.steps} steps of each number of ranks, {options.clock} clock; commit "
            f"{origin.commit or 'unknown'}"
        )
    ]
    for form in study.forms:
        title = (
            f"{form.form}: seconds of the slowest rank (one rank: {form.one_rank_seconds:.4g} s, deviation "
            f"{form.one_rank_deviation:.2g}; its law: {form.law.replace('_', ' ')})"
        )
        shown.append(console.table([_row(row) for row in form.rows], title=title))
        shown.append(console.text(_verdict(form)))
        if form.cost_model is not None:
            shown.append(cost_model_table(form.cost_model))
    if logged is not None:
        shown.append(_logged_table(study, logged))
    return shown


def _row(row: RanksRow) -> dict[str, Any]:
    by_method = {
        name: f"{row.forecasts[name]:.4g} ({100 * row.errors[name]:+.1f} %)" if name in row.forecasts else None
        for name in METHODS
    }
    return {
        "ranks": row.ranks,
        "measured": f"{row.measured_seconds:.4g} ± {row.standard_error:.2g}",
        "slowest / mean": f"{row.measured_wait:.4f}",
        **by_method,
    }


def _verdict(form: FormForecast) -> str:
    """Returns which forecasts are within the aim at every number of ranks."""
    lines = []
    for method in METHODS:
        error = form.largest_error(method)
        if error is None:
            lines.append(f"{method}: none, {form.cost_model_refusal}")
        else:
            verdict = "within" if error <= AIM else "NOT within"
            lines.append(f"{method}: {verdict} {100 * AIM:.0f} % everywhere (at most {100 * error:.1f} % off)")
    return "\n".join(lines)


def _logged_table(study: ForecastStudy, logged: LoggedRanks) -> RenderableType:
    rows = [
        {
            "": f"the log, {logged.steps} steps on {logged.ranks} real ranks",
            "slowest, s": f"{logged.slowest_seconds:.4g}",
            "slowest / mean": f"{logged.wait:.4f}",
        }
    ]
    for form in study.forms:
        rows += [
            {
                "": f"{form.form}, {row.ranks} ranks in turn on one device",
                "slowest, s": f"{row.measured_seconds:.4g}",
                "slowest / mean": f"{row.measured_wait:.4f}",
            }
            for row in form.rows
            if row.ranks == logged.ranks
        ]
    return console.table(rows, title="Comparison with a real run, whose ranks share the machine's memory and cores")
