"""Runs the study of forecasts on this process's device."""

from evenpack import console
from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import configure_logging, joined_world
from evenpack.progress import Progress
from evenpack.studies.forecast.forecast import (
    METHODS,
    ForecastOptions,
    study_forecast,
)
from evenpack.studies.forecast.logged_ranks import LoggedRanks
from evenpack.studies.forecast.tables import forecast_tables
from evenpack.studies.throughput.measured import StepProgress


def forecast_run(config: RunConfig, options: ForecastOptions, *, logged: LoggedRanks | None) -> Report:
    """Returns the study, for JSON and for people."""
    with joined_world() as world, Progress(console.messages()) as progress:
        configure_logging(world)
        study = study_forecast(config, world, options, progress=StepProgress(progress))
    value = {
        "study": study,
        "errors": {form.form: {method: form.largest_error(method) for method in METHODS} for form in study.forms},
        "logged": logged,
    }
    return Report(value=value, shown=forecast_tables(study, logged))
