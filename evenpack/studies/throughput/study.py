"""The speed of a run's steps in each layout, at each packing depth, and the cost of a micro-batch.

One engine takes all steps in turn, a step of each contender per round, so that other load of the machine affects all
of them. Ratios are of steps of the same round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.config import RunConfig
from evenpack.engine.parts.metrics_writer import peak_flops
from evenpack.engine.resolving.cost_model import CostModel, MeasuredOn
from evenpack.engine.world.distributed import World
from evenpack.errors import DataError
from evenpack.progress import Progress
from evenpack.studies.cost_model_fit import MicroBatchTimes, fit_cost_model
from evenpack.studies.provenance import name_of_prepared
from evenpack.studies.throughput.contenders import (
    contender,
    depth_contenders,
    depth_name,
    run_to_measure,
    sample_micro_batches,
    sequences_per_item,
)
from evenpack.studies.throughput.measure import (
    ClockName,
    MeasuredStep,
    Quartiles,
    StepTimer,
    measured_on,
    with_step_counts,
)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """The layouts and depths to measure, and the number of steps."""

    layouts: tuple[str, ...]
    """Names of `FORMS`."""
    depths: tuple[int | None, ...]
    """Depths; None: no limit."""
    rounds: int
    warmup: int
    """Warm-up rounds."""
    samples: int
    """Micro-batches for the cost model in addition to the layouts' own; 0: no cost model."""
    clock: ClockName


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """The result of one layout; amounts over all ranks."""

    layout: str
    step_seconds: Quartiles
    forward_seconds: float
    """This and the phases below are medians of rank 0."""
    backward_seconds: float
    all_reduce_seconds: float
    update_seconds: float
    loader_seconds: float
    """The wait of a run without loader workers; see `MeasuredStep`."""
    wait_share: float
    """Share of the steps' time for which the mean rank waits for the slowest one's forward and backward passes. From
    ZeRO 2 on ranks wait for each other within these passes too, which it does not contain."""
    slots_per_second: Quartiles
    tokens_per_second: Quartiles
    sequences_per_second: Quartiles
    sequences_per_pack: float
    padding_share: float
    useful_tflops: Quartiles
    """Operations per second over real tokens, 1e12."""
    performed_tflops: Quartiles
    mfu: Quartiles | None
    """Useful operations over the dense peak; None where the device's is not known."""
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class DepthRow:
    """The result of packs of up to `depth` sequences (PackedBERT, table 1)."""

    depth: int | None
    """The limit of depth; None: none."""
    packing_factor: float
    """Mean sequences per pack, over an epoch."""
    step_seconds: Quartiles
    overhead: Quartiles
    """Cost of packs over the unmasked model: seconds / seconds - 1."""
    predicted_speed_up: float
    """Predicted over padding: packing factor / (1 + overhead), times the width of a padded row / slots of a pack."""
    realised_speed_up: Quartiles
    """Speed-up in sequences/s over padding, at as many rows per step."""


@dataclass(frozen=True, kw_only=True)
class ThroughputStudy:
    """All results of the study."""

    run: str
    data: str
    """What a figure calls the data: the sources and the beginning of their fingerprint."""
    ranks: int
    measured_on: MeasuredOn
    rows_per_step: int
    """Packs, or single sequences in layouts of these."""
    rows_per_micro_batch: int
    pack_length: int
    max_sequence_length: int
    options: ThroughputOptions
    layouts: tuple[LayoutRow, ...]
    ratio_of_promised_speed_up: float | None
    """Packed over padded sequences/s, divided by the packing factor of the same steps."""
    depths: tuple[DepthRow, ...]
    cost_model: CostModel | None
    cost_model_refusal: str | None
    """Reason why there is no cost model, if one was requested."""


def study_throughput(
    config: RunConfig, world: World, options: ThroughputOptions, *, progress: Progress
) -> ThroughputStudy:
    """Runs the study on every rank. A first step each, or `warmup` of them, does not count.

    Raises: NotPreparedError, DataError; ConfigError if these ranks cannot divide a step.
    """
    run = run_to_measure(config, share=(world.rank, world.size))
    config, prepared = run.config, run.prepared
    timer = StepTimer(run, world, clock=options.clock)
    by_layout = {form: contender(form, run, world) for form in options.layouts}
    of_depths = depth_contenders(run, world, options.depths) if options.depths else {}
    measured = measure_in_turn(timer, by_layout | of_depths, options, progress=progress)
    rows = tuple(layout_row(timer, form, measured[form]) for form in options.layouts)
    origin = measured_on(run, world, layouts=options.layouts)
    model, refusal = None, None
    if options.samples:
        steps = [step for form in options.layouts for step in measured[form]]
        singles = contender("unpadded/max_tokens", run, world)
        times = _sampled_times(timer, singles, options, progress)
        model, refusal = _fit(world, [*(step.micro_batches for step in steps), *times], steps, origin)
    return ThroughputStudy(
        run=config.run.name,
        data=name_of_prepared(prepared),
        ranks=world.size,
        measured_on=origin,
        rows_per_step=config.training.items_per_step,
        rows_per_micro_batch=config.training.items_per_micro_batch,
        pack_length=prepared.pack_length,
        max_sequence_length=config.data.recipe.max_sequence_length,
        options=options,
        layouts=rows,
        ratio_of_promised_speed_up=_promised(measured),
        depths=_depth_rows(config, options.depths, of_depths, measured),
        cost_model=model,
        cost_model_refusal=refusal,
    )


def measure_in_turn(
    timer: StepTimer, contenders: Mapping[str, MicroBatchDataset], options: ThroughputOptions, *, progress: Progress
) -> dict[str, list[MeasuredStep]]:
    """Takes a step of each in every round; step t of one is step t of all."""
    measured: dict[str, list[MeasuredStep]] = {name: [] for name in contenders}
    total = (options.warmup + options.rounds) * len(contenders)
    done, shown = 0, progress.begin("step", counted=True)
    for number in range(options.warmup + options.rounds):
        for name, dataset in contenders.items():
            step = timer.time_step_of(dataset, number)
            done += 1
            shown.update(done, total, facts=[name])
            if number >= options.warmup:
                measured[name].append(step)
    return measured


def layout_row(timer: StepTimer, name: str, steps: Sequence[MeasuredStep]) -> LayoutRow:
    """Returns the row of a layout, or of whatever else these steps are called, from their medians and quartiles."""

    def median(values: Sequence[float]) -> float:
        return float(np.median(values))

    def rate(amounts: Sequence[float] | Sequence[int]) -> Quartiles:
        return Quartiles.of([amount / step.step_seconds for amount, step in zip(amounts, steps, strict=True)])

    peak = peak_flops(timer.run.config, timer.world)
    useful = [float(step.useful_flops) for step in steps]
    return LayoutRow(
        layout=name,
        step_seconds=Quartiles.of([step.step_seconds for step in steps]),
        forward_seconds=median([step.forward_seconds for step in steps]),
        backward_seconds=median([step.backward_seconds for step in steps]),
        all_reduce_seconds=median([step.all_reduce_seconds for step in steps]),
        update_seconds=median([step.update_seconds for step in steps]),
        loader_seconds=median([step.loader_seconds for step in steps]),
        wait_share=sum(step.waiting_seconds for step in steps) / sum(step.step_seconds for step in steps),
        slots_per_second=rate([step.slots for step in steps]),
        tokens_per_second=rate([step.tokens for step in steps]),
        sequences_per_second=rate([step.sequences for step in steps]),
        sequences_per_pack=median([step.sequences / step.packs for step in steps]),
        padding_share=median([1.0 - step.tokens / step.slots for step in steps]),
        useful_tflops=rate([flops / 1e12 for flops in useful]),
        performed_tflops=rate([step.performed_flops / 1e12 for step in steps]),
        mfu=None if peak is None else rate([flops / peak for flops in useful]),
        peak_memory_bytes=max(step.peak_memory_bytes for step in steps),
    )


def _promised(measured: dict[str, list[MeasuredStep]]) -> float | None:
    """Returns the ratios round by round, because the two lay out the same sequences."""
    if not {"packed", "padded"} <= measured.keys():
        return None
    speed_ups = ratios(measured["padded"], measured["packed"])
    promised = [step.sequences / step.packs for step in measured["packed"]]
    return float(np.median([real / hoped for real, hoped in zip(speed_ups, promised, strict=True)]))


def _depth_rows(
    config: RunConfig,
    depths: Sequence[int | None],
    contenders: Mapping[str, MicroBatchDataset],
    measured: Mapping[str, Sequence[MeasuredStep]],
) -> tuple[DepthRow, ...]:
    narrower = config.data.recipe.max_sequence_length / config.data.pack_length
    rows = []
    for depth in depths:
        steps = measured[depth_name(depth)]
        factor = sequences_per_item(contenders[depth_name(depth)])
        overhead = Quartiles.of([ratio - 1.0 for ratio in ratios(steps, measured["unmasked"])])
        realised = Quartiles.of([factor * ratio for ratio in ratios(measured["padding"], steps)])
        rows.append(
            DepthRow(
                depth=depth,
                packing_factor=factor,
                step_seconds=Quartiles.of([step.step_seconds for step in steps]),
                overhead=overhead,
                predicted_speed_up=factor * narrower / (1.0 + overhead.median),
                realised_speed_up=realised,
            )
        )
    return tuple(rows)


def ratios(steps: Sequence[MeasuredStep], others: Sequence[MeasuredStep]) -> list[float]:
    """Returns the ratios of the seconds, round by round."""
    return [step.step_seconds / other.step_seconds for step, other in zip(steps, others, strict=True)]


def _sampled_times(
    timer: StepTimer, singles: MicroBatchDataset, options: ThroughputOptions, progress: Progress
) -> list[MicroBatchTimes]:
    """Times the sampled micro-batches, the same on each rank, as whole steps."""
    size = timer.engine.micro_batches
    count = -(-options.samples // size) * size
    batches = list(sample_micro_batches(singles, count))
    times, shown = [], progress.begin("step", counted=True)
    for first in range(0, count, size):
        step = with_step_counts(batches[first : first + size])
        if timer.world.device.type == "cuda":
            timer.time_step(step)  # a shape's first pass also loads kernels, chooses algorithms and takes memory
        times.append(timer.time_step(step).micro_batches)
        shown.update(first + size, count, facts=["cost model"])
    return times


def _fit(
    world: World, times: Sequence[MicroBatchTimes], steps: Sequence[MeasuredStep], origin: MeasuredOn
) -> tuple[CostModel | None, str | None]:
    """Fits the cost model to the measurements of rank 0."""
    alone = world.size == 1
    per_step = float(np.median([step.update_seconds + (step.all_reduce_seconds if alone else 0.0) for step in steps]))
    try:
        everything = MicroBatchTimes.concatenate(times)
        return fit_cost_model(everything, per_step=per_step, measured_on=origin), None
    except DataError as error:
        return None, str(error)
