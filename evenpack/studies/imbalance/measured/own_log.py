"""Which log stands beside the simulation: the one that is named, or the run's own if it is of the run as it is now."""

from dataclasses import dataclass

from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError, DataError
from evenpack.studies.imbalance.measured.comparable import different_settings
from evenpack.studies.imbalance.measured.logged_run import LoggedRun, read_logged_run
from evenpack.studies.imbalance.request import ImbalanceRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundLog:
    """The log to show, if there is one."""

    log: LoggedRun | None
    ranks: int | None
    """Ranks of the run at its last start, or of the log; None if neither is known."""
    notes: tuple[str, ...]
    """Why the run's own log is left out, or what could not be checked of it."""


def find_log(request: ImbalanceRequest, run: ResolvedRun | None) -> FoundLog:
    """Returns the log that is named, else the run's own.

    Raises: ConfigError or DataError if a baseline is given and there is no log to compare it with.
    """
    if request.log is not None:
        return FoundLog(log=request.log, ranks=request.log.ranks, notes=())
    if run is None:
        request.refuse_log_options()
        return FoundLog(log=None, ranks=None, notes=())
    record = read_run_record(run.config.run.output_dir)
    ranks = None if record is None else record.starts[-1].ranks
    try:
        log = _own_log(request, run, record)
    except (ConfigError, DataError) as error:
        if request.has_baseline:
            raise
        return FoundLog(log=None, ranks=ranks, notes=(f"No measured steps of the run itself: {error}",))
    unchecked = f"There is no run.json beside {log.log.path}: whether it is of this step, model and data is unknown."
    return FoundLog(log=log, ranks=log.ranks, notes=(unchecked,) if record is None else ())


def _own_log(request: ImbalanceRequest, run: ResolvedRun, record: RunRecord | None) -> LoggedRun:
    path = run.config.run.output_dir / METRICS
    if not path.is_file():
        raise ConfigError(f"there is no {path}; train it first, or name another log as --log FILE")
    if record is not None:
        settings = different_settings(record.config, run.settled_config.model_dump(mode="json"))
        if settings:
            raise ConfigError(f"{path} is of a run with other settings (there and here: {settings})")
        if record.data.fingerprint != run.prepared.fingerprint(seed=0):
            raise ConfigError(f"{path} is of a run over other data than {run.prepared.directory} holds now")
    return read_logged_run(path, warm_up_steps=request.given.log_warmup)
