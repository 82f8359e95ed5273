"""Parses the options of `evenpack study forecast`."""

from functools import partial
from pathlib import Path

from evenpack.engine.reporting.metrics import read_metrics, trained_steps
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.errors import ConfigError
from evenpack.studies.forecast.arguments import ForecastArguments
from evenpack.studies.forecast.forecast import ForecastOptions
from evenpack.studies.forecast.logged_ranks import read_logged_ranks
from evenpack.studies.forecast.real_run import RealRun
from evenpack.studies.plotting import require_plot
from evenpack.studies.shared_options import parse_list, whole_number
from evenpack.studies.throughput.contenders import parse_forms
from evenpack.studies.throughput.measure import parse_clock


def parse_options(command: ForecastArguments) -> ForecastOptions:
    """Parses the options. Raises: ConfigError for values that cannot be timed, before anything is read."""
    if command.plot is not None:
        require_plot(command.plot)
    count = partial(whole_number, least=0, problem="is not a number of ranks", example="2,4,8")
    return ForecastOptions(
        forms=parse_forms(command.layouts),
        ranks=tuple(sorted({*parse_list(command.ranks, "--ranks", count)} - {1})),  # one rank is measured in any case
        steps=command.steps,
        fit_steps=command.fit_steps,
        warmup=command.warmup,
        simulated_steps=command.simulated_steps,
        clock=parse_clock(command.clock),
    )


def read_log(path: Path, *, warmup: int) -> RealRun:
    """Reads the log, and the run.json beside it.

    Raises: ConfigError if there is no such file; DataError or RunError for one without times of ranks.
    """
    if not path.is_file():
        raise ConfigError(f"--log {path}: there is no such file; give the metrics.jsonl of a run")
    records = trained_steps(read_metrics(path))
    record = read_run_record(path.parent)
    return RealRun(
        label=path.name if record is None else str(record.config["run"]["name"]),
        path=path,
        logged=read_logged_ranks(records, warmup=warmup),
        record=record,
    )
