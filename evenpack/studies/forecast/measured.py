"""Runs the study of forecasts on this process's device."""

from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import configure_logging, joined_world
from evenpack.progress import Progress
from evenpack.studies.forecast.forecast import (
    METHODS,
    ForecastOptions,
    ForecastStudy,
    study_forecast,
)
from evenpack.studies.forecast.plots import plot_forecast
from evenpack.studies.forecast.real_run import RealRun, require_same_steps
from evenpack.studies.forecast.tables import forecast_tables
from evenpack.studies.throughput.contenders import run_to_measure
from evenpack.studies.throughput.measure import StepProgress


def forecast_run(config: RunConfig, options: ForecastOptions, *, real: RealRun | None, plot: Path | None) -> Report:
    """Returns the study, for JSON and for people, and draws it if `plot` is given.

    Raises: ConfigError, before anything is timed, if the real run's steps are others; and as `study_forecast`.
    """
    warnings = () if real is None else require_same_steps(real, run_to_measure(config), options)
    with joined_world() as world, Progress(console.messages()) as progress:
        configure_logging(world)
        study = study_forecast(config, world, options, progress=StepProgress(progress))
    warnings += _device_warnings(study, real)
    value = {
        "study": study,
        "errors": {form.form: {method: form.largest_error(method) for method in METHODS} for form in study.forms},
        "logged": None if real is None else real.logged,
        "warnings": warnings,
    }
    shown = forecast_tables(study, None if real is None else real.logged)
    shown += [console.text(f"warning: {warning}") for warning in warnings]
    if plot is not None:
        plot_forecast(study, plot, real=real, warnings=warnings)
        shown.append(console.text(f"Drew {plot}"))
    return Report(value=value, shown=shown)


def _device_warnings(study: ForecastStudy, real: RealRun | None) -> tuple[str, ...]:
    theirs = None if real is None or real.record is None else real.record.starts[-1].device
    if theirs in (None, study.measured_on.device):
        return ()
    return (
        f"the real run was measured on {theirs}, and the study on {study.measured_on.device}: compare how long ranks "
        "wait (slowest / mean), not seconds",
    )
