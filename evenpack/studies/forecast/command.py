"""What `evenpack study forecast` does."""

from typing import Any

from rich.console import RenderableType

from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import configure_logging, joined_world
from evenpack.studies.forecast.forecast import (
    METHODS,
    ForecastOptions,
    study_forecast,
)
from evenpack.studies.forecast.logged_ranks import LoggedRanks
from evenpack.studies.forecast.tables import forecast_tables
from evenpack.studies.throughput.command import StudyProgress


def forecast_run(
    config: RunConfig, options: ForecastOptions, *, logged: LoggedRanks | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """The study as a value for JSON and as what rich can print."""
    with joined_world() as world:
        configure_logging(world)
        study = study_forecast(config, world, options, progress=StudyProgress(silent=False))
    value = {
        "study": study,
        "errors": {form.form: {method: form.largest_error(method) for method in METHODS} for form in study.forms},
        "logged": logged,
    }
    return value, forecast_tables(study, logged)
