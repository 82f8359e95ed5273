"""The study of waiting: clusters simulated and replayed, a run that was measured, and the published curve.

Options are checked, and logs read, before any lengths are; a run and its log complete what no option says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenpack import console
from evenpack.data.packing import pack
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.engine.world.distributed import configure_logging, joined_world
from evenpack.errors import ConfigError, DataError
from evenpack.progress import FREQUENT_LINES_SECONDS, Progress
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.imbalance.extrapolation import (
    PUBLISHED_CLUSTER,
    PUBLISHED_DEVICES,
    PUBLISHED_LENGTHS,
    LogForecast,
    ReferenceCurve,
    forecast_from_log,
    reference_curve,
)
from evenpack.studies.imbalance.measurement import (
    LoggedRun,
    MeasuredComparison,
    log_of_run,
    measure,
    read_logged_run,
    timing_differences,
)
from evenpack.studies.imbalance.replay import Replay, replay
from evenpack.studies.imbalance.simulation import (
    FittedNoise,
    Simulation,
    fit_noise,
    make_cluster,
    parse_devices,
    simulate,
)
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, StepCost, estimate_for, find_cost
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.plotting import require_plot
from evenpack.studies.provenance import provenance_of_runs
from evenpack.studies.statistics.laws import Gumbel

_DEVICES = "1..2048"
_FEWEST_REPLAYED_STEPS = 2
"""Least number of steps of a replay: an interval needs two."""
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
    forecast: LogForecast | None
    """The forecast from the measured steps for other numbers of devices, if there is one."""
    reference: ReferenceCurve | None
    """The published curve, if it is to be shown."""
    fitted_noise: FittedNoise | None
    """The noise of the simulated clusters, if it was fitted to the published law."""
    notes: tuple[str, ...]
    """What was left out, and why."""
    warnings: tuple[str, ...]


def run_study(given: ImbalanceCommand, find_subject: Callable[[], Subject]) -> ImbalanceStudy:
    """Checks the options, reads what was measured, checks that it compares, and simulates.

    Raises: ConfigError for an invalid option, or a baseline that is none for the run; DataError for a log that cannot
    be used.
    """
    check_options(given)
    named_devices = parse_devices(given.devices or _DEVICES)
    replayed = () if given.replay is None else parse_devices(given.replay, option="--replay")
    cost = None if given.cost_model is None else find_cost(given.cost_model)
    law = Gumbel(location=given.reference_location, scale=given.reference_scale)
    baseline = named_log = None
    if given.baseline_run is not None:
        baseline = read_logged_run(log_of_run(given.baseline_run), warm_up_steps=given.log_warmup)
    if given.log is not None:
        named_log = read_logged_run(given.log, column=given.log_column, warm_up_steps=given.log_warmup)

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
    fitted = None
    if given.noise == "published":
        cluster = make_cluster(subject.histogram, packing, cost=cost, options=options, causal=given.causal)
        fitted = fit_noise(cluster, law, devices=given.reference_devices)
        options = replace(options, noise=fitted.share)
    else:
        options = replace(options, noise=cost.noise if given.noise == "cost_model" else float(given.noise))
    own_devices = () if given.devices is not None or ranks is None else (ranks,)
    devices = tuple(sorted({*named_devices, *replayed, *own_devices}))

    measured = forecast = None
    warnings: list[str] = []
    if log is not None:
        measured = measure(
            log,
            ranks=_require_ranks(given.log_devices, log),
            baseline=baseline,
            padded_baseline=given.padded_baseline,
            cost=cost,
        )
        warnings = [*measured.warnings, *_baseline_warnings(options, baseline)]
        why_not = _why_no_forecast(log, measured)
        if why_not is not None:
            notes.append(f"No forecast from the measured steps for other numbers of devices: {why_not}.")
        elif measured.padded_baseline is not None:
            forecast = forecast_from_log(
                log.log, log_devices=measured.run.ranks, padded_baseline=measured.padded_baseline, counts=devices
            )
    packs = options.packs_with(packing.packing_factor)
    replay_found = None if run is None else _replay(run, given, replayed, options, packs=packs)
    reference = None
    if shows_reference(given, subject.origin):
        reference = reference_curve(law, given.reference_devices, devices)
    with Progress(console.messages(), interval_seconds=FREQUENT_LINES_SECONDS) as progress:
        simulation = simulate(
            subject.histogram,
            packing,
            devices=devices,
            cost=cost,
            options=options,
            causal=given.causal,
            laws=_laws_beside(reference, devices, measured),
            progress=progress,
        )
    return ImbalanceStudy(
        subject=subject,
        footer=_footer(subject, [one for one in (log, baseline) if one is not None], replay_found),
        step=step,
        simulation=simulation,
        replay=replay_found,
        measured=measured,
        forecast=forecast,
        reference=reference,
        fitted_noise=fitted,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _replay(
    run: ResolvedRun, given: ImbalanceCommand, devices: Sequence[int], options: ClusterOptions, *, packs: int
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


def check_options(given: ImbalanceCommand) -> None:
    """Checks what can be checked before any file is read. Raises: ConfigError."""
    require_plot(given.plot)
    require_plot(given.plot_steps, option="--plot-steps")
    for name in ("reference_devices", "log_devices"):
        count = getattr(given, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {count}")
    cluster_options(given, None, baseline=None, packing_factor=1.0)
    if given.noise not in ("cost_model", "published"):
        try:
            ClusterOptions(noise=float(given.noise))
        except ValueError:
            message = f"--noise is a share such as 0.05, cost_model or published, not {given.noise}"
            raise ConfigError(message) from None
    if given.replay_steps < _FEWEST_REPLAYED_STEPS:
        raise ConfigError(f"--replay-steps must be {_FEWEST_REPLAYED_STEPS} or more, not {given.replay_steps}")
    if given.log_warmup is not None and given.log_warmup < 0:
        raise ConfigError(f"--log-warmup must be 0 steps or more, not {given.log_warmup}")
    if given.padded_baseline is not None and not 0 < given.padded_baseline < float("inf"):
        raise ConfigError(f"--padded-baseline is a number of sequences/s above 0, not {given.padded_baseline}")
    if given.padded_baseline is not None and given.baseline_run is not None:
        raise ConfigError("--padded-baseline and --baseline-run both say what the speed-up is over: give one of them")
    if given.log is not None and given.padded_baseline is None and given.baseline_run is None:
        raise ConfigError(
            f"--log {given.log} gives rates; a speed-up also needs the rates of padded training on the same devices: "
            "give them as --padded-baseline SEQ/S, above 0, or name a padded run by --baseline-run"
        )


def shows_reference(given: ImbalanceCommand, origin: str) -> bool:
    """Whether the published curve is drawn: by default beside the lengths that it was published for."""
    if given.published is not None:
        return given.published
    asked = (given.reference_location, given.reference_scale, given.reference_devices)
    published = (PUBLISHED_CLUSTER.location, PUBLISHED_CLUSTER.scale, PUBLISHED_DEVICES)
    return asked != published or origin == PUBLISHED_LENGTHS


def cluster_options(
    given: ImbalanceCommand, step: StepOfRun | None, *, baseline: LoggedRun | None, packing_factor: float
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
        all_reduce_bytes=given.all_reduce_bytes,
        bandwidth=None if given.bandwidth is None else 1e9 * given.bandwidth,
        seed=given.seed,
    )


def _baseline_items(baseline: LoggedRun | None, batching: str) -> int | None:
    if baseline is None or baseline.config is None or baseline.config.training.batching != batching:
        return None
    return baseline.config.training.items_per_micro_batch


def _step_of(run: ResolvedRun, ranks: int | None, given: ImbalanceCommand) -> StepOfRun:
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
    given: ImbalanceCommand, named: LoggedRun | None, run: ResolvedRun | None
) -> tuple[LoggedRun | None, int | None, list[str]]:
    """Returns the log that is named, else the run's own; its ranks, as far as they are known; and notes.

    The notes say why the run's own log is left out, or what could not be checked of it.

    Raises: ConfigError or DataError if a baseline is given and there is no log to compare it with; ConfigError for an
    option for a log that there is not.
    """
    if named is not None:
        return named, named.ranks, []
    if run is None:
        for name in ("baseline_run", "padded_baseline", "log_column", "log_warmup", "log_devices"):
            if getattr(given, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is an option for a log: give it with --log FILE, or a run (.yaml) "
                    "that has trained"
                )
        return None, None, []
    record = read_run_record(run.config.run.output_dir)
    try:
        log = _own_log(run, record, warm_up_steps=given.log_warmup)
    except (ConfigError, DataError) as error:
        if given.baseline_run is not None or given.padded_baseline is not None:
            raise
        ranks = None if record is None else record.starts[-1].ranks
        return None, ranks, [f"No measured steps of the run itself: {error}"]
    unchecked = f"There is no run.json beside {log.log.path}: whether it is of this step, model and data is unknown."
    return log, log.ranks, [unchecked] if record is None else []


def _own_log(run: ResolvedRun, record: RunRecord | None, *, warm_up_steps: int | None) -> LoggedRun:
    path = run.config.run.output_dir / METRICS
    if not path.is_file():
        raise ConfigError(f"there is no {path}; train it first, or name another log as --log FILE")
    if record is not None:
        settings = timing_differences(record.config, run.config.model_dump(mode="json"))
        if settings:
            raise ConfigError(f"{path} is of a run with other settings (there and here: {settings})")
        if record.data.fingerprint != run.prepared.fingerprint(seed=0):
            raise ConfigError(f"{path} is of a run over other data than {run.prepared.directory} holds now")
    return read_logged_run(path, warm_up_steps=warm_up_steps)


def _require_ranks(given: int | None, log: LoggedRun) -> int:
    """Returns the ranks of a log. Raises: ConfigError if the option says another number than the log does."""
    if log.ranks is not None and given not in (None, log.ranks):
        raise ConfigError(
            f"{log.log.path} is of a run with {log.ranks} ranks, and --log-devices is {given}: leave the option out"
        )
    return log.ranks or given or _DEFAULT_LOG_DEVICES


def _baseline_warnings(options: ClusterOptions, baseline: LoggedRun | None) -> list[str]:
    """Returns a warning if the baseline divides its step otherwise than the clusters that are simulated."""
    if baseline is None or baseline.config is None or baseline.ranks is None:
        return []
    training = baseline.config.training
    accumulation = training.items_per_step / (training.items_per_micro_batch * baseline.ranks)
    if accumulation == options.accumulation:
        return []
    return [
        f"{baseline.label} has {accumulation:g} micro-batches per step and rank; its steps are simulated with "
        f"{options.accumulation}"
    ]


def _why_no_forecast(log: LoggedRun, measured: MeasuredComparison) -> str | None:
    """Returns why there is no forecast for other numbers of devices; None if there is one."""
    if measured.padded_baseline is None:
        return "a speed-up over padding needs a padded run: name it by --baseline-run, or give --padded-baseline SEQ/S"
    if log.config is not None and log.config.training.policy != "arrival":
        return f"{log.label} is {log.layout}, so its ranks are not independent draws, which a forecast assumes"
    return None


def _laws_beside(
    reference: ReferenceCurve | None, devices: Sequence[int], measured: MeasuredComparison | None
) -> dict[int, Gumbel | None]:
    """Returns the clusters whose single steps are kept, with the law that each is compared with.

    These are one device and the reference's cluster, or, without a reference, the measured or the largest cluster.
    """
    if reference is None:
        return {1: None, (max(devices) if measured is None else measured.run.ranks): None}
    laws: dict[int, Gumbel | None] = {1: reference.single}
    return laws | ({reference.devices: reference.fitted} if reference.devices <= max(devices) else {})


def _footer(subject: Subject, logs: Sequence[LoggedRun], replayed: Replay | None) -> tuple[str, ...]:
    return (
        f"Simulated: lengths of {subject.provenance_line(device='no device')}",
        *([] if replayed is None else [f"Replayed: {replayed.described()}"]),
        *(f"Measured: {provenance_of_runs(log.label, [log.record])}" for log in logs),
    )
