"""The clusters that are simulated for a run: what its file and its ranks say, where no option says otherwise."""

from dataclasses import dataclass

from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.arguments import ImbalanceArguments
from evenpack.studies.imbalance.measured.logged_run import LoggedRun
from evenpack.studies.imbalance.simulated.cluster import ClusterOptions
from evenpack.studies.lengths.subject import Subject

DEFAULT_BATCH = 32
"""Sequences per micro-batch where INPUT is not a run, as in PackedBERT."""


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


def step_of(run: ResolvedRun, ranks: int | None, *, given: ImbalanceArguments) -> StepOfRun:
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
    given: ImbalanceArguments, step: StepOfRun | None, *, baseline: LoggedRun | None, packing_factor: float
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
        noise=given.noise,
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


DEFAULT_LOG_DEVICES = 8
"""Devices of a log that does not say how many, as in PackedBERT."""
