"""The study of waiting: clusters simulated and replayed, a run that was measured, and the published curve."""

from dataclasses import dataclass, replace
from typing import Any

from evenpack import console
from evenpack.data.packing import Packing, pack
from evenpack.engine.config import RunConfig
from evenpack.engine.provenance import commit_of_source
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import configure_logging, joined_world
from evenpack.progress import Progress
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.extrapolation import LogForecast, ReferenceCurve, forecast_from_log, reference_curve
from evenpack.studies.imbalance.measurement import LoggedRun, MeasuredComparison, measure
from evenpack.studies.imbalance.replay import Replay, replay
from evenpack.studies.imbalance.request import (
    ImbalanceRequest,
    StepOfRun,
    baseline_warnings,
    cluster_options,
    find_log,
    require_ranks,
    resolved_subject,
    step_of,
)
from evenpack.studies.imbalance.simulation import FittedNoise, Simulation, fit_noise, make_cluster, simulate
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, StepCost, estimate_for, find_cost
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.provenance import provenance_of_runs
from evenpack.studies.statistics.laws import Gumbel
from evenpack.studies.throughput.measure import StepProgress
from evenpack.version import VERSION

_LINE_SECONDS = 5.0
_SHORT_NAME = 12
"""Characters of a fingerprint that tell data apart for people."""


@dataclass(frozen=True, kw_only=True)
class ImbalanceStudy:
    """Simulated, replayed, measured and published results, kept separate."""

    origin: str
    """Origin of the lengths."""
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


def run_study(subject: Subject, request: ImbalanceRequest) -> ImbalanceStudy:
    """Reads what was measured, checks that it compares, and simulates.

    Raises: ConfigError if a baseline is none for the run; DataError for a log that cannot be used.
    """
    run = resolved_subject(subject)
    if run is None:
        request.refuse_replay(subject.origin)
    found = find_log(request, run)
    step = None if run is None else step_of(run, found.ranks, given=request.given)
    cost = request.cost or _cost_of(run)
    packing = pack(subject.histogram, pack_length=subject.pack_length)
    factor = packing.packing_factor
    options = cluster_options(request.given, step, baseline=request.baseline, packing_factor=factor)
    fitted = None
    if request.noise == "published":
        cluster = make_cluster(subject.histogram, packing, cost=cost, options=options, causal=request.given.causal)
        fitted = fit_noise(cluster, request.reference_law, devices=request.given.reference_devices)
        options = replace(options, noise=fitted.share)
    else:
        options = replace(options, noise=cost.noise if request.noise == "cost_model" else request.noise)
    devices = request.simulated_devices(found.ranks)
    measured = None if found.log is None else _measured(found.log, request, cost)
    forecast, why_not = (None, ()) if found.log is None or measured is None else _forecast(found.log, measured, devices)
    replayed = None if run is None else _replay(run.config, request, options, packs=options.packs_with(factor))
    reference = None
    if request.shows_reference(subject.origin):
        reference = reference_curve(request.reference_law, request.given.reference_devices, devices)
    laws = _laws_beside(reference, devices, measured)
    warnings = [] if measured is None else [*measured.warnings, *baseline_warnings(options, request.baseline)]
    return ImbalanceStudy(
        origin=subject.origin,
        footer=_footer(subject, [one for one in (found.log, request.baseline) if one is not None], replayed),
        step=step,
        simulation=_simulate(
            subject, packing, devices=devices, cost=cost, options=options, causal=request.given.causal, laws=laws
        ),
        replay=replayed,
        measured=measured,
        forecast=forecast,
        reference=reference,
        fitted_noise=fitted,
        notes=(*found.notes, *why_not),
        warnings=tuple(warnings),
    )


def _measured(log: LoggedRun, request: ImbalanceRequest, cost: StepCost) -> MeasuredComparison:
    return measure(
        log,
        ranks=require_ranks(request.given.log_devices, log),
        baseline=request.baseline,
        padded_baseline=request.given.padded_baseline,
        cost=cost,
    )


def _replay(config: RunConfig, request: ImbalanceRequest, options: ClusterOptions, *, packs: int) -> Replay | None:
    if not request.replayed:
        return None
    with joined_world() as world, Progress(console.messages()) as progress:
        configure_logging(world)
        return replay(
            config,
            world,
            devices=request.replayed,
            steps=request.given.replay_steps,
            options=options,
            packs=packs,
            progress=StepProgress(progress),
        )


def _simulate(subject: Subject, packing: Packing, **settings: Any) -> Simulation:
    with Progress(console.messages(), interval_seconds=_LINE_SECONDS) as progress:
        steps = progress.begin("simulating", unit="sequences", starts_processes=True)
        return simulate(
            subject.histogram,
            packing,
            progress=lambda state: steps.update(state.share, 1.0, amount=state.sequences),
            **settings,
        )


def _cost_of(run: ResolvedRun | None) -> StepCost:
    """Returns the cost model of the run, else an estimate of its model."""
    if run is None:
        return find_cost(DEFAULT_COST)
    path = run.config.training.cost_model
    return estimate_for(run) if path is None else find_cost(str(path))


def _forecast(
    log: LoggedRun, measured: MeasuredComparison, devices: tuple[int, ...]
) -> tuple[LogForecast | None, tuple[str, ...]]:
    """Returns the forecast for other numbers of devices, or why there is none."""
    if measured.padded_baseline is None:
        why = "a speed-up over padding needs a padded run: name it by --baseline-run, or give --padded-baseline SEQ/S"
    elif log.config is not None and log.config.training.policy != "arrival":
        why = f"{log.label} is {log.layout}, so its ranks are not independent draws, which a forecast assumes"
    else:
        forecast = forecast_from_log(
            log.log, log_devices=measured.run.ranks, padded_baseline=measured.padded_baseline, counts=devices
        )
        return forecast, ()
    return None, (f"No forecast from the measured steps for other numbers of devices: {why}.",)


def _laws_beside(
    reference: ReferenceCurve | None, devices: tuple[int, ...], measured: MeasuredComparison | None
) -> dict[int, Gumbel | None]:
    """Returns the clusters whose single steps are kept, with the law that each is compared with.

    These are one device and the reference's cluster, or, without a reference, the measured or the largest cluster.
    """
    if reference is None:
        return {1: None, (max(devices) if measured is None else measured.run.ranks): None}
    laws: dict[int, Gumbel | None] = {1: reference.single}
    return laws | ({reference.devices: reference.fitted} if reference.devices <= max(devices) else {})


def _footer(subject: Subject, logs: list[LoggedRun], replayed: Replay | None) -> tuple[str, ...]:
    commit = commit_of_source()
    data = "" if subject.prepared is None else f", data {subject.prepared.fingerprint(seed=0)[:_SHORT_NAME]}"
    made = f"evenpack {VERSION}, {'no checkout' if commit is None else f'commit {commit}'}"
    return (
        f"Simulated: lengths of {subject.origin}{data}; {made}; no device",
        *([] if replayed is None else [f"Replayed: {replayed.described()}"]),
        *(f"Measured: {provenance_of_runs(log.label, [log.record])}" for log in logs),
    )
