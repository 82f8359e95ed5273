"""The options of `evenpack study imbalance`, checked before any lengths are read and completed by a run and its log."""

from dataclasses import dataclass
from typing import Literal

from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.run_record import RunRecord, read_run_record
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.errors import ConfigError, DataError
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.imbalance.extrapolation import PUBLISHED_CLUSTER, PUBLISHED_DEVICES, PUBLISHED_LENGTHS
from evenpack.studies.imbalance.measurement import LoggedRun, different_settings, log_of_run, read_logged_run
from evenpack.studies.imbalance.simulation import parse_devices
from evenpack.studies.imbalance.step_cost import StepCost, find_cost
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.plotting import require_plot
from evenpack.studies.statistics.laws import Gumbel

_DEVICES = "1..2048"
FEWEST_REPLAYED_STEPS = 2
"""Least number of steps of a replay: an interval needs two."""
DEFAULT_BATCH = 32
"""Sequences per micro-batch where INPUT is not a run, as in PackedBERT."""
DEFAULT_LOG_DEVICES = 8
"""Devices of a log that does not say how many, as in PackedBERT."""


class ImbalanceRequest:
    """The options, and the logs that they name.

    Raises: ConfigError for an invalid option; DataError for a log that cannot be read.
    """

    def __init__(self, given: ImbalanceCommand) -> None:
        self.given = given
        _check(given)
        self.devices = parse_devices(_DEVICES if given.devices is None else given.devices)
        self.replayed: tuple[int, ...] = () if given.replay is None else parse_devices(given.replay, option="--replay")
        self.cost: StepCost | None = None if given.cost_model is None else find_cost(given.cost_model)
        """The cost of a step; None: taken from the subject's model."""
        self.noise: float | Literal["cost_model", "published"] = _parse_noise(given.noise)
        self.reference_law = Gumbel(location=given.reference_location, scale=given.reference_scale)
        self.log: LoggedRun | None = None
        """The log that is named; None: the run's own, if there is one."""
        self.baseline: LoggedRun | None = None
        if given.baseline_run is not None:
            self.baseline = read_logged_run(log_of_run(given.baseline_run), warm_up_steps=given.log_warmup)
        if given.log is not None:
            self.log = read_logged_run(given.log, column=given.log_column, warm_up_steps=given.log_warmup)

    @property
    def has_baseline(self) -> bool:
        """Whether a speed-up of measured steps is asked for."""
        return self.given.baseline_run is not None or self.given.padded_baseline is not None

    def shows_reference(self, origin: str) -> bool:
        """Whether the published curve is drawn: by default beside the lengths that it was published for."""
        if self.given.published is not None:
            return self.given.published
        own = (self.reference_law, self.given.reference_devices) != (PUBLISHED_CLUSTER, PUBLISHED_DEVICES)
        return own or origin == PUBLISHED_LENGTHS

    def simulated_devices(self, ranks: int | None) -> tuple[int, ...]:
        """Returns the numbers of devices to simulate; the run's own is among them unless others were named.

        Those that are replayed always are.
        """
        own = () if self.given.devices is not None or ranks is None else (ranks,)
        return tuple(sorted({*self.devices, *self.replayed, *own}))

    def refuse_replay(self, origin: str) -> None:
        """Checks that no replay of a plain list of lengths is asked for. Raises: ConfigError."""
        if self.replayed:
            raise ConfigError(
                f"--replay computes the batches of a run, and {origin} is a list of lengths: give a run file (.yaml) "
                "whose data is prepared"
            )

    def refuse_log_options(self) -> None:
        """Checks that no option is given for a log that there is not. Raises: ConfigError."""
        for name in ("baseline_run", "padded_baseline", "log_column", "log_warmup", "log_devices"):
            if getattr(self.given, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is an option for a log: give it with --log FILE, or a run (.yaml) "
                    "that has trained"
                )


def _parse_noise(given: str) -> float | Literal["cost_model", "published"]:
    """Returns a share, or where it is to come from. Raises: ConfigError."""
    if given == "cost_model":
        return "cost_model"
    if given == "published":
        return "published"
    try:
        share = float(given)
    except ValueError:
        raise ConfigError(f"--noise is a share such as 0.05, cost_model or published, not {given}") from None
    return ClusterOptions(noise=share).noise


def _check(given: ImbalanceCommand) -> None:
    for path in (given.plot, given.plot_steps):
        if path is not None:
            require_plot(path)
    for name in ("reference_devices", "log_devices"):
        count = getattr(given, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {count}")
    cluster_options(given, None, baseline=None, packing_factor=1.0)
    if given.replay_steps < FEWEST_REPLAYED_STEPS:
        raise ConfigError(f"--replay-steps must be {FEWEST_REPLAYED_STEPS} or more, not {given.replay_steps}")
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


def resolved_subject(subject: Subject) -> ResolvedRun | None:
    """Returns the run of a subject as training would resolve it; None for a plain list of lengths."""
    if subject.config is None or subject.prepared is None:
        return None
    return resolve(subject.config, subject.prepared)


def step_of(run: ResolvedRun, ranks: int | None, *, given: ImbalanceCommand) -> StepOfRun:
    """Returns the step of a run. Raises: ConfigError if the ranks cannot divide it and no accumulation is given."""
    training = run.config.training
    items = training.items_per_micro_batch
    return StepOfRun(
        packs=items if training.batching == "packs" else None,
        batch=items if training.batching == "sequences" else None,
        accumulation=run.micro_batches(ranks) if ranks is not None and given.accumulation is None else None,
        ranks=ranks,
        zero_stage=run.config.deepspeed.zero_stage,
    )


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
        batch = DEFAULT_BATCH if packs is None or step is None else max(1, round(packs * packing_factor))
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


def baseline_warnings(options: ClusterOptions, baseline: LoggedRun | None) -> list[str]:
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


def _baseline_items(baseline: LoggedRun | None, batching: str) -> int | None:
    if baseline is None or baseline.config is None or baseline.config.training.batching != batching:
        return None
    return baseline.config.training.items_per_micro_batch


def require_ranks(given: int | None, log: LoggedRun) -> int:
    """Returns the ranks of a log. Raises: ConfigError if the option says another number than the log does."""
    if log.ranks is not None and given not in (None, log.ranks):
        raise ConfigError(
            f"{log.log.path} is of a run with {log.ranks} ranks, and --log-devices is {given}: leave the option out"
        )
    return log.ranks or given or DEFAULT_LOG_DEVICES


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
        settings = different_settings(record.config, run.config.model_dump(mode="json"))
        if settings:
            raise ConfigError(f"{path} is of a run with other settings (there and here: {settings})")
        if record.data.fingerprint != run.prepared.fingerprint(seed=0):
            raise ConfigError(f"{path} is of a run over other data than {run.prepared.directory} holds now")
    return read_logged_run(path, warm_up_steps=request.given.log_warmup)
