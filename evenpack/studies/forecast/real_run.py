"""A real run on several ranks, and whether its steps are those that the study times."""

from dataclasses import dataclass
from pathlib import Path

from evenpack.config import validate
from evenpack.data.order.step_shape import default_policy
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.reporting.run_record import RUN_RECORD, RunRecord
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError
from evenpack.studies.forecast.forecast import ForecastOptions
from evenpack.studies.forecast.logged_ranks import LoggedRanks
from evenpack.studies.report.comparison import differing

_SPEED = ("attention.", "masking.", "training.precision")
"""What changes the time of a micro-batch on the same model and data."""


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A run that has trained on several ranks."""

    label: str
    path: Path
    """Its log."""
    logged: LoggedRanks
    record: RunRecord | None
    """What run.json says; None where there is none beside the log."""


def require_same_steps(real: RealRun, run: ResolvedRun, options: ForecastOptions) -> tuple[str, ...]:
    """Returns warnings for what could not be checked or matters less.

    Raises: ConfigError if the run has another number of rows per rank, another layout, model or data, or ranks that are
    not predicted.
    """
    if real.logged.ranks not in options.ranks:
        raise ConfigError(
            f"--log {real.path} is of {real.logged.ranks} ranks, and --ranks {','.join(map(str, options.ranks))} does "
            f"not predict that number: add {real.logged.ranks} to --ranks"
        )
    if real.record is None:
        return (
            f"there is no {RUN_RECORD} beside {real.path}: whether its rows per rank, layout, model and data are those "
            "of the study is unknown",
        )
    training = _config_of(real, real.record).training
    _require_rows(real, training, run.config.training)
    form = form_of(training)
    if form not in options.forms:
        remedy = "which the study cannot time" if form is None else f"add --layouts {form}"
        raise ConfigError(
            f"--log {real.path} is of {form or 'packs in another assignment than the default'}, and the study times "
            f"{', '.join(options.forms)}: {remedy}"
        )
    return _require_same_work(real, real.record, run)


def form_of(training: TrainingSection) -> str | None:
    """Returns the name of the study's layout that forms such steps; None if it has none."""
    if training.batching == "sequences":
        return f"{training.layout}/{training.policy}"
    return training.layout if training.policy == default_policy("packs", training.layout) else None


def form_of_run(real: RealRun) -> str | None:
    """Returns the same of a real run; None if it is not recorded."""
    return None if real.record is None else form_of(_config_of(real, real.record).training)


def _config_of(real: RealRun, record: RunRecord) -> RunConfig:
    return validate(dict(record.config), RunConfig, origin=str(real.path.with_name(RUN_RECORD)))


def _require_rows(real: RealRun, logged: TrainingSection, timed: TrainingSection) -> None:
    rows = logged.items_per_step / real.logged.ranks
    if rows != timed.items_per_step:
        raise ConfigError(
            f"--log {real.path} is of a run with {rows:g} rows per rank (training.{logged.batching}_per_step "
            f"{logged.items_per_step} on {real.logged.ranks} ranks), and the study times {timed.items_per_step} rows "
            f"per rank: set training.{timed.batching}_per_step={rows:g}"
        )
    if logged.items_per_micro_batch != timed.items_per_micro_batch:
        raise ConfigError(
            f"--log {real.path} is of a run with {logged.items_per_micro_batch} rows per micro-batch, and the study "
            f"times {timed.items_per_micro_batch}: set training.{timed.batching}_per_micro_batch="
            f"{logged.items_per_micro_batch}"
        )


def _require_same_work(real: RealRun, record: RunRecord, run: ResolvedRun) -> tuple[str, ...]:
    ours = run.settled_config.model_dump(mode="json")
    models = differing(record.config, ours, ("model.",))
    models.pop("model.max_positions", None)  # the study has positions for whole packs, whatever the run file says
    if models:
        raise ConfigError(f"--log {real.path} is of another model than the run file ({_shown(models)}, there and here)")
    if record.data.fingerprint != run.prepared.fingerprint(seed=0):
        raise ConfigError(
            f"--log {real.path} is of a run over other data ({', '.join(record.data.sources)}) than "
            f"{run.prepared.directory}: sequences of other lengths wait otherwise"
        )
    others = differing(record.config, ours, _SPEED)
    return (f"{real.label} had other settings than the run file has: {_shown(others)}",) if others else ()


def _shown(differences: dict[str, tuple[str, str]]) -> str:
    return "; ".join(f"{key} {there} and {here}" for key, (there, here) in differences.items())
