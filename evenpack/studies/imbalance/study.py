"""The study of waiting: clusters simulated and replayed, a run that was measured, and the published curve.

Options are checked, and logs read, before any lengths are; a run and its log complete what no option says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack import console
from evenpack.data.packing import pack
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.engine.world.distributed import configure_logging, joined_world
from evenpack.errors import ConfigError, DataError
from evenpack.progress import FREQUENT_LINES_SECONDS, Progress
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.extrapolation import PUBLISHED_LENGTHS, PublishedCurve, published_curve
from evenpack.studies.imbalance.measurement import (
    LoggedRun,
    MeasuredComparison,
    log_of_run,
    measure,
    pooled,
    read_logged_run,
    timing_differences,
)
from evenpack.studies.imbalance.options import ImbalanceOptions
from evenpack.studies.imbalance.regimes import LEAST_REGIME_STEPS, RegimeForecast, divide, forecast_from_regimes
from evenpack.studies.imbalance.replay import Replay, replay
from evenpack.studies.imbalance.simulation import Simulation, parse_devices, simulate
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, StepCost, estimate_for, find_cost
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.plotting import require_plot
from evenpack.studies.provenance import provenance_of_runs

_DEVICES = "1..2048"
_DEFAULT_BATCH = 32
"""Sequences per micro-batch where INPUT is not a run, as in PackedBERT."""
_DEFAULT_LOG_DEVICES = 8
"""Devices of a log that does not say how many, as in PackedBERT."""


@dataclass(frozen=True, kw_only=True)
class StepOfRun:
    """One step of a run on one rank."""

    packs: int | None
    """Packs per micro-batch; None if the run counts sequences."""
    batch: int | None
    """Sequences per micro-batch; None if the run counts packs."""
    accumulation: int | None
    """Micro-batches per step and rank; None if the number of ranks is not known."""
    ranks: int | None
    zero_stage: int


@dataclass(frozen=True, kw_only=True)
class ImbalanceStudy:
    """Simulated, replayed, measured and published results, kept separate."""

    subject: Subject
    footer: tuple[str, ...]
    """Run, data, commit and device, for figures."""
    step: StepOfRun | None
    """Step of the run from which the simulated clusters are taken; None for a plain list of lengths."""
    simulation: Simulation
    replay: Replay | None
    """Clusters replayed on this device, if requested."""
    measured: MeasuredComparison | None
    """Steps of a real run, if there are any."""
    regimes: RegimeForecast | None
    """The forecast from the regimes of measured steps for more devices."""
    reference: PublishedCurve | None
    """The published curve, if it is to be shown."""
    notes: tuple[str, ...]
    """What was left out, and why."""
    warnings: tuple[str, ...]


def run_study(given: ImbalanceOptions, find_subject: Callable[[], Subject]) -> ImbalanceStudy:
    """Checks the options, reads what was measured, checks that it compares, and simulates.

    Raises: ConfigError for an invalid option, or a baseline that is none for the run; DataError for a log that cannot
    be used.
    """
    check_options(given)
    named_devices = parse_devices(given.devices or _DEVICES)
    replayed = () if given.replay is None else parse_devices(given.replay, option="--replay")
    cost = None if given.cost_model is None else find_cost(given.cost_model)
    baseline = named_log = None
    if given.baseline_run is not None:
        baseline = read_logged_run(log_of_run(given.baseline_run))
    if given.log is not None:
        named_log = _read_logs(given)

    subject = find_subject()
    run = None
    if subject.config is not None and subject.prepared is not None:
        run = resolve(subject.config, subject.prepared)
    elif replayed:
        raise ConfigError(
            f"--replay computes the batches of a run, and {subject.origin} is a list of lengths: give a run file "
            "(.yaml) whose data is prepared"
        )
    log, ranks, notes = _find_log(given, named_log, run)
    step = None if run is None else _step_of(run, ranks, given)
    cost = cost or _cost_of(run)
    packing = pack(subject.histogram, pack_length=subject.pack_length)
    options = cluster_options(given, step, baseline=baseline, packing_factor=packing.packing_factor)
    own_devices = () if given.devices is not None or ranks is None else (ranks,)
    devices = tuple(sorted({*named_devices, *replayed, *own_devices}))

    measured = regimes = None
    if log is not None:
        measured = measure(log, ranks=_require_ranks(given.log_devices, log), baseline=baseline, cost=cost)
        regimes, why = _forecast(log, measured, given.regime_steps, devices)
        notes += why
    packs = options.packs_with(packing.packing_factor)
    replay_found = None if run is None else _replay(run, given, replayed, options, packs=packs)
    reference = published_curve(devices) if subject.origin == PUBLISHED_LENGTHS else None
    with Progress(console.messages(), interval_seconds=FREQUENT_LINES_SECONDS) as progress:
        simulation = simulate(
            subject.histogram,
            packing,
            devices=devices,
            cost=cost,
            options=options,
            progress=progress,
        )
    return ImbalanceStudy(
        subject=subject,
        footer=_footer(subject, [one for one in (log, baseline) if one is not None], replay_found),
        step=step,
        simulation=simulation,
        replay=replay_found,
        measured=measured,
        regimes=regimes,
        reference=reference,
        notes=tuple(notes),
        warnings=() if measured is None else measured.warnings,
    )


def _forecast(
    log: LoggedRun, measured: MeasuredComparison, regime_steps: int | None, devices: Sequence[int]
) -> tuple[RegimeForecast | None, list[str]]:
    """Returns the forecast from the regimes of a log, and notes: why there is none, or what is not known.

    Raises: DataError if the log has fewer than two of the regimes that were named.
    """
    division = divide([part.every_rate for part in log.parts or (log.log,)], regime_steps)
    count = len(division.regimes)
    if regime_steps is not None and count < 2:
        raise DataError(
            f"--regime-steps {regime_steps}: {log.label} has {count} regimes of {LEAST_REGIME_STEPS} steps or more, "
            "and a variance between regimes needs two: give the logs of more or longer runs, or leave the option out"
        )
    none = "No forecast from the measured steps for other numbers of devices:"
    if log.config is not None and log.config.training.policy != "arrival":
        return None, [
            f"{none} {log.label} is {log.layout}, so its ranks are not independent draws, which a forecast assumes."
        ]
    if not count:
        return None, [f"{none} {log.label} has no regime of {LEAST_REGIME_STEPS} steps that differ."]
    found = forecast_from_regimes(
        division, log_devices=measured.run.ranks, counts=devices, padded_baseline=measured.padded_baseline
    )
    alone = (
        "One regime: no variance between regimes is known, forecasts take steps as draws of one law, and intervals "
        "are of blocks of steps."
    )
    return found, [alone] if count == 1 else []


def _replay(
    run: ResolvedRun, given: ImbalanceOptions, devices: Sequence[int], options: ClusterOptions, *, packs: int
) -> Replay | None:
    if not devices:
        return None
    with joined_world() as world, Progress(console.messages()) as progress:
        configure_logging(world)
        return replay(
            run.config,
            world,
            devices=devices,
            steps=given.replay_steps,
            options=options,
            packs=packs,
            progress=progress,
        )


def check_options(given: ImbalanceOptions) -> None:
    """Checks what can be checked before any file is read. Raises: ConfigError."""
    require_plot(given.plot)
    cluster_options(given, None, baseline=None, packing_factor=1.0)
    if given.regime_steps is not None and given.regime_steps < LEAST_REGIME_STEPS:
        raise ConfigError(f"--regime-steps must be {LEAST_REGIME_STEPS} or more, not {given.regime_steps}")


def _read_logs(given: ImbalanceOptions) -> LoggedRun:
    """Reads the logs that are named. Raises: ConfigError, DataError."""
    named = [given.log] if isinstance(given.log, str | Path) else given.log or []
    paths = [path for one in map(Path, named) for path in (sorted(one.iterdir()) if one.is_dir() else [one])]
    paths = [path for path in paths if not path.is_dir()]
    if not paths:
        raise ConfigError(f"--log {', '.join(map(str, named))}: there is no file")
    return pooled([read_logged_run(one) for one in paths])


def cluster_options(
    given: ImbalanceOptions, step: StepOfRun | None, *, baseline: LoggedRun | None, packing_factor: float
) -> ClusterOptions:
    """Returns what is given, else the run's, else the baseline's, else what fits to the rest.

    Micro-batches of packs and of sequences hold as many sequences on average unless both are known.
    Raises: ConfigError for a number that is out of range.
    """
    batch, packs = given.batch, given.packs
    if step is not None and batch is None:
        batch = step.batch or _baseline_items(baseline, "sequences")
        packs = packs or step.packs or _baseline_items(baseline, "packs")
    if batch is None:
        batch = _DEFAULT_BATCH if packs is None or step is None else max(1, round(packs * packing_factor))
    accumulation, zero_stage = (1, 0) if step is None else (step.accumulation or 1, step.zero_stage)
    return ClusterOptions(
        batch=batch,
        packs=packs,
        accumulation=accumulation if given.accumulation is None else given.accumulation,
        zero_stage=zero_stage if given.zero_stage is None else given.zero_stage,
        steps=given.steps,
        seed=given.seed,
    )


def _baseline_items(baseline: LoggedRun | None, batching: str) -> int | None:
    if baseline is None or baseline.config is None or baseline.config.training.batching != batching:
        return None
    return baseline.config.training.items_per_micro_batch


def _step_of(run: ResolvedRun, ranks: int | None, given: ImbalanceOptions) -> StepOfRun:
    """Returns the step of a run. Raises: ConfigError if the ranks cannot divide it and no accumulation is given."""
    training = run.config.training
    items = training.items_per_micro_batch
    return StepOfRun(
        packs=items if training.batching == "packs" else None,
        batch=items if training.batching == "sequences" else None,
        accumulation=run.settled.micro_batches(ranks) if ranks is not None and given.accumulation is None else None,
        ranks=ranks,
        zero_stage=run.config.deepspeed.zero_stage,
    )


def _cost_of(run: ResolvedRun | None) -> StepCost:
    """Returns the cost model of the run, else an estimate of its model."""
    if run is None:
        return find_cost(DEFAULT_COST)
    path = run.config.training.cost_model
    return estimate_for(run) if path is None else find_cost(str(path))


def _find_log(
    given: ImbalanceOptions, named: LoggedRun | None, run: ResolvedRun | None
) -> tuple[LoggedRun | None, int | None, list[str]]:
    """Returns the log that is named, else the run's own; its ranks, as far as they are known; and notes.

    The notes say why the run's own log is left out, or what could not be checked of it.

    Raises: ConfigError or DataError if a baseline is given and there is no log to compare it with; ConfigError for an
    option for a log that there is not.
    """
    if named is not None:
        return named, named.ranks, []
    if run is None:
        for name in ("baseline_run", "log_devices", "regime_steps"):
            if getattr(given, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is an option for a log: give it with --log FILE, or a run (.yaml) "
                    "that has trained"
                )
        return None, None, []
    record = read_run_record(run.config.run.output_dir)
    try:
        log = _own_log(run, record)
    except (ConfigError, DataError) as error:
        if given.baseline_run is not None:
            raise
        ranks = None if record is None else record.starts[-1].ranks
        return None, ranks, [f"No measured steps of the run itself: {error}"]
    unchecked = f"There is no run.json beside {log.log.path}: whether it is of this step, model and data is unknown."
    return log, log.ranks, [unchecked] if record is None else []


def _own_log(run: ResolvedRun, record: RunRecord | None) -> LoggedRun:
    path = run.config.run.output_dir / METRICS
    if not path.is_file():
        raise ConfigError(f"there is no {path}; train it first, or name another log as --log FILE")
    if record is not None:
        settings = timing_differences(record.config, run.config.model_dump(mode="json"))
        if settings:
            raise ConfigError(f"{path} is of a run with other settings (there and here: {settings})")
        if record.data.fingerprint != run.prepared.fingerprint(seed=0):
            raise ConfigError(f"{path} is of a run over other data than {run.prepared.directory} holds now")
    return read_logged_run(path)


def _require_ranks(given: int | None, log: LoggedRun) -> int:
    """Returns the ranks of a log. Raises: ConfigError if the option says another number than the log does."""
    if log.ranks is not None and given not in (None, log.ranks):
        raise ConfigError(
            f"{log.log.path} is of a run with {log.ranks} ranks, and --log-devices is {given}: leave the option out"
        )
    return log.ranks or given or _DEFAULT_LOG_DEVICES


def _footer(subject: Subject, logs: Sequence[LoggedRun], replayed: Replay | None) -> tuple[str, ...]:
    return (
        f"Simulated: lengths of {subject.provenance_line(device='no device')}",
        *([] if replayed is None else [f"Replayed: {replayed.described()}"]),
        *(f"Measured: {provenance_of_runs(log.label, [log.record])}" for log in logs),
    )
