"""The study of waiting: the published curve, a log and simulated clusters side by side."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.data.packing import pack
from evenpack.errors import ConfigError
from evenpack.progress import Progress
from evenpack.studies.imbalance.arguments import ImbalanceArguments
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.forecast import LogForecast, forecast_from_log
from evenpack.studies.imbalance.plots import ImbalanceStudy, plot_imbalance
from evenpack.studies.imbalance.reference import reference_curve
from evenpack.studies.imbalance.simulation import Simulation, parse_devices, simulate
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, StepCost, estimate_for, find_cost
from evenpack.studies.imbalance.step_log import read_step_log
from evenpack.studies.imbalance.step_plots import plot_step_speed_ups
from evenpack.studies.imbalance.tables import imbalance_tables
from evenpack.studies.lengths.subject import Subject, long_lines
from evenpack.studies.plotting import require_plot
from evenpack.studies.statistics.laws import Gumbel

_LINE_SECONDS = 5.0


class ImbalanceRequest:
    """The options, checked before anything is read.

    Raises: ConfigError for an invalid one.
    """

    def __init__(self, options: ImbalanceArguments) -> None:
        for path in (options.plot, options.plot_steps):
            if path is not None:
                require_plot(path)
        self.devices = parse_devices(options.devices)
        for name, count in (("--reference-devices", options.reference_devices), ("--log-devices", options.log_devices)):
            if count < 1:
                raise ConfigError(f"{name} must be 1 or more, not {count}")
        self.cluster = cluster_options(options)
        self.cost: StepCost | None = None if options.cost_model is None else find_cost(options.cost_model)
        """None: by the subject's model."""
        self.causal = options.causal
        self.plot = options.plot
        self.plot_steps = options.plot_steps
        self.reference = reference_curve(
            Gumbel(location=options.reference_location, scale=options.reference_scale),
            options.reference_devices,
            self.devices,
        )
        self.forecast = _forecast(options, self.devices)


def cluster_options(options: ImbalanceArguments) -> ClusterOptions:
    """Returns the cluster's options. Raises: ConfigError for a number that is out of range."""
    return ClusterOptions(
        batch=options.batch,
        packs=options.packs,
        accumulation=options.accumulation,
        zero_stage=options.zero_stage,
        steps=options.steps,
        all_reduce_bytes=options.all_reduce_bytes,
        bandwidth=None if options.bandwidth is None else 1e9 * options.bandwidth,
        noise=options.noise,
        seed=options.seed,
    )


def study_imbalance(subject: Subject, request: ImbalanceRequest) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the study as a value for JSON and as rich tables; draws it if requested."""
    study = ImbalanceStudy(
        origin=subject.origin,
        reference=request.reference,
        forecast=request.forecast,
        simulation=_simulate(subject, request),
    )
    shown = [*long_lines(subject), *imbalance_tables(study)]
    if request.plot is not None:
        plot_imbalance(study, request.plot)
        shown.append(console.text(f"Drew {request.plot}"))
    if request.plot_steps is not None:
        plot_step_speed_ups(study, request.plot_steps)
        shown.append(console.text(f"Drew {request.plot_steps}"))
    value = {
        "origin": study.origin,
        "long_sequences": subject.long_sequences(),
        "devices": request.devices,
        "reference": study.reference,
        "log": study.forecast,
        "simulation": study.simulation,
    }
    return value, shown


def _simulate(subject: Subject, request: ImbalanceRequest) -> Simulation:
    packing = pack(subject.histogram, pack_length=subject.pack_length)
    cost = request.cost or (find_cost(DEFAULT_COST) if subject.model is None else estimate_for(subject.model))
    with Progress(console.messages(), interval_seconds=_LINE_SECONDS) as progress:
        steps = progress.begin("simulating", unit="sequences")
        return simulate(
            subject.histogram,
            packing,
            devices=request.devices,
            cost=cost,
            options=request.cluster,
            causal=request.causal,
            laws=_laws_beside(request),
            progress=lambda state: steps.update(state.share, 1.0, amount=state.sequences),
        )


def _laws_beside(request: ImbalanceRequest) -> dict[int, Gumbel]:
    """Returns the reference's laws of a step on one device and, if as many are simulated, on its own cluster."""
    reference = request.reference
    cluster = {reference.devices: reference.fitted} if reference.devices <= max(request.devices) else {}
    return {1: reference.single} | cluster


def _forecast(options: ImbalanceArguments, devices: Sequence[int]) -> LogForecast | None:
    if options.log is None:
        given = [
            name
            for name, value in (
                ("--padded-baseline", options.padded_baseline),
                ("--log-column", options.log_column),
                ("--log-warmup", options.log_warmup),
            )
            if value is not None
        ]
        if given:
            raise ConfigError(f"{given[0]} is an option for a log: give it with --log FILE")
        return None
    if options.log_warmup is not None and options.log_warmup < 0:
        raise ConfigError(f"--log-warmup must be 0 steps or more, not {options.log_warmup}")
    if options.padded_baseline is None or not options.padded_baseline > 0:
        raise ConfigError(
            f"--log {options.log} gives rates; a speed-up needs those of padded training on the same "
            f"{options.log_devices} devices too: give them as --padded-baseline SEQ/S, above 0"
        )
    log = read_step_log(options.log, column=options.log_column, warm_up_steps=options.log_warmup)
    return forecast_from_log(
        log, log_devices=options.log_devices, padded_baseline=options.padded_baseline, counts=devices
    )
