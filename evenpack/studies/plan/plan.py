"""The plan of a run: a section for each question that one has before a machine is reserved.

Tokens are real ones. Operations are counted on the model over real tokens (`models/cost.py`), as for MFU. Steps are
computed by training's own function.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.assignment import StepAssignment
from evenpack.data.order.step_shape import AssignmentPolicy, Batching, Layout
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.data_facts import AverageItem, drawn_shares, order_of
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.resolving.settle import SettledRun, parameters_of
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.models.common.device_peaks import DevicePeak, find_device_peak, known_device
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of
from evenpack.studies.lengths.statistics import LengthStatistics, length_statistics
from evenpack.studies.plan.data import RunData, settled_data
from evenpack.studies.plan.memory import RunMemory, run_memory
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.rates import Rate, rate_of_cost_model, rate_of_device, timed_rate
from evenpack.units import counted
from evenpack.visible_pairs import total_pairs_within

log = logging.getLogger(__name__)

CHINCHILLA_RATIO = 20
"""Tokens per parameter for about the lowest loss at a given number of operations (Hoffmann et al. 2022)."""

TRAINING_FLOPS = 6
"""Operations per parameter and token of training: forward, and backward of twice that (Kaplan et al. 2020, 2.1)."""

_HOUR = 3600.0
_BALANCED_STEPS = 4
"""Steps that are planned to see how well their cost is balanced."""


@dataclass(frozen=True, kw_only=True)
class PlannedSource:
    """The part of a source in a run."""

    source: str
    documents: int
    sequences: int
    items_per_epoch: int
    tokens_per_epoch: int
    share: float
    """Fraction of the packs or sequences of a step."""
    steps_per_epoch: float | None
    """Steps of the run per epoch of this source; the steps draw from the other sources as well. None: none does."""
    epochs: float


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The padding of one kind of rows."""

    rows: str
    slots: int
    padding: int
    share: float
    """Fraction of the slots."""
    wasted_flops: int
    """Operations on padding, in addition to those on real tokens."""


@dataclass(frozen=True, kw_only=True)
class PlannedData:
    """What the data is."""

    sources: tuple[PlannedSource, ...]
    """Empty where the data is not known."""
    lengths: LengthStatistics | None
    """The sequences; None where they are not known, or are rows that are packs already."""
    packing_efficiency: float
    """Fraction of the slots of a pack, or of the longest possible sequence, that hold a token."""
    packing_factor: float
    """Sequences per pack; 1 for steps of single sequences."""
    epochs: float | None
    """Epochs of all sources together, as `training.epochs` counts them; None where the data is not known."""
    padding: tuple[Padding, ...]
    """What the run pads, and what rows of one sequence each would."""
    vocabulary_size: int
    assumptions: tuple[str, ...]
    """Assumptions, where the data is not prepared."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The most expensive rank over the mean rank, by the weights with which the run balances, over some steps."""

    steps: int
    largest: float
    """What all other ranks wait for; the mean of the steps."""
    bound: float
    """What no assignment of the same packs, as many to each rank, can be below."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step is."""

    ranks: int
    layout: Layout
    batching: Batching
    """The items that the next two count."""
    items: int
    items_per_micro_batch: int
    micro_batches: int
    """Micro-batches of each rank; DeepSpeed's gradient accumulation."""
    assignment: AssignmentPolicy
    sequences: float
    """Sequences, on average."""
    tokens: float
    """Real tokens, on average."""
    slots: int | None
    """Slots; None if they depend on the sequences of a step."""
    slots_per_micro_batch: int | None
    balance: Balance | None
    """None for data that is not prepared, and for one rank."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """The duration of a run."""

    on: str
    """The devices."""
    hours: float
    least: float
    most: float
    device_hours: float
    tokens_per_second: float
    basis: str
    """The measurement from which the hours are computed."""


@dataclass(frozen=True, kw_only=True)
class PlannedCost:
    """What the run costs."""

    steps: int
    sequences: float
    """Sequences on average, as are the tokens."""
    tokens: float
    model: str
    is_causal: bool
    parameters: int
    tokens_per_parameter: float
    compute_optimal_tokens: float
    """Tokens by the rule of 20 per parameter (Hoffmann et al. 2022)."""
    flops: int
    """Operations of all steps, counted on the model."""
    flops_by_rule: float
    """Operations by the rule of 6 for each parameter and token."""
    hours: Hours | None
    """None without a device whose rate is known."""


@dataclass(frozen=True, kw_only=True)
class PlannedStart:
    """What would be started."""

    devices: str | None
    """The devices and why they were chosen; None, as are the next two, for ranks whose machines are not known."""
    command: tuple[str, ...] | None
    environment: Mapping[str, str] | None
    packing_adjustment: tuple[str, ...]
    """The changes by training.packing_adjustment, and the values of a step in tokens and of the length; all numbers of
    the plan are those after them."""
    gradient_clipping: str
    """The norm to which gradients are clipped, and the program that does it."""
    initial_weights: str | None
    """The weights from which a new run starts, or why there are none yet; None: those of its seed."""
    deepspeed: dict[str, Any]
    """Configuration for `deepspeed.initialize`."""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage of a run."""

    first_step: int
    last_step: int
    changes: Mapping[str, Any]
    """Keys of the run file that it changes, with their values; empty for the first."""
    learning_rate: float
    """Learning rate at the end of warm-up, the highest of the stage."""
    shares: Mapping[str, float]
    """Fraction of the draws of each source."""
    step: PlannedStep
    memory: RunMemory


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run before it starts.

    Of a run with stages, data and cost are those of all of them, the step is of the first, and memory of the largest.
    """

    run: str
    data: PlannedData
    step: PlannedStep
    memory: RunMemory
    cost: PlannedCost
    start: PlannedStart
    stages: tuple[PlannedStage, ...]
    """All stages; empty if there is only one."""

    def __repr__(self) -> str:
        """Returns a line with the size of the run; `vars` has all values."""
        step, cost = self.step, self.cost
        epochs = ", ".join(f"{one.epochs:,.2f} epochs of {one.source}" for one in self.data.sources)
        return (
            f"RunPlan({cost.steps:,} steps of {step.items:,} {step.batching} on {counted(step.ranks, 'rank')}: "
            f"{cost.tokens:,.0f} tokens, {epochs}; {cost.parameters:,} parameters)"
        )


def plan_run(
    config: RunConfig,
    options: PlanOptions,
    *,
    ranks: int,
    resolved: ResolvedRun | None = None,
    is_timed: bool = False,
) -> RunPlan:
    """Plans a run.

    The plan is exact over prepared data; otherwise it is estimated from counts, or from assumptions.

    Args:
        resolved: the run, if it is resolved already; its steps are then balanced as well.
        is_timed: whether micro-batches of `resolved` are timed on this machine's CPU, for the hours.

    Raises: ConfigError if the ranks cannot divide a step, for an unknown device, or for a length that follows from
    data that is not prepared; DataError for data that was prepared from another section.
    """
    peak = _device(options.device)
    settled, data = settled_data(config, options, resolved)
    config = settled.config
    steps, items = len(config.span), _items(config)
    stages = _stages(config, data, ranks, resolved, peak) if config.stages else ()
    work = data.useful.of_items(
        items, slots=round(items * data.item.tokens), sequences=round(items * data.item.sequences)
    )
    flops = step_flops(config.model, vocabulary_size=data.vocabulary_size, work=work)
    padding = _padding(config, data, items, work, useful=flops)
    tokens = float(items * data.item.tokens)
    cost_model = None if resolved is None or options.mfu is not None else _cost_model(resolved, peak)
    rate = None
    if cost_model is not None:
        slots = items * data.item.row_slots if config.training.layout == "packed" else work.slots
        micro_batches = items // config.training.items_per_micro_batch
        if stages:
            micro_batches = sum((one.last_step - one.first_step + 1) * ranks * one.step.micro_batches for one in stages)
        updates = ranks * steps
        performed = replace(work, slots=slots)
        rate = rate_of_cost_model(cost_model, performed, flops=flops, micro_batches=micro_batches, updates=updates)
    elif resolved is not None and is_timed:
        rate = timed_rate(resolved, ranks=ranks)
    elif peak is not None and (options.device is not None or peak.has_bfloat16):
        wasted = padding[-1].wasted_flops / flops if padding and config.training.layout == "padded" else 0.0
        rate = rate_of_device(config, peak, mfu=options.mfu, padding=wasted)
    return RunPlan(
        run=config.run.name,
        data=_planned_data(config, data, items, padding, resolved),
        step=_step(settled, data, ranks, resolved, config.span),
        memory=max((stage.memory for stage in stages), key=lambda one: one.total)
        if stages
        else run_memory(config, data.item, vocabulary_size=data.vocabulary_size, ranks=ranks, device=peak),
        cost=_cost(config, data, flops, hours=None if rate is None else _hours(rate, flops, tokens, ranks)),
        start=PlannedStart(
            devices=None,
            command=None,
            environment=None,
            packing_adjustment=settled.adjustment,
            gradient_clipping=_clipping(config),
            initial_weights=_initial_weights(config.training.initialize_from),
            deepspeed=deepspeed_config(config, ranks),
        ),
        stages=stages,
    )


def _stages(
    config: RunConfig, data: RunData, ranks: int, resolved: ResolvedRun | None, peak: DevicePeak | None
) -> tuple[PlannedStage, ...]:
    """Returns each stage as an ordinary run of its own."""
    found: list[PlannedStage] = []
    memories: dict[tuple[int, int, AverageItem], RunMemory] = {}
    staged = config.staged()
    ends = [*(step for step, _ in staged[1:]), config.span.stop]
    for index, (first, one) in enumerate(staged):
        if ends[index] <= config.span.start:
            continue  # done by the parent
        steps = range(max(first, config.span.start), ends[index])
        run = None if resolved is None else resolved.of_stages[index]
        of_stage = data if run is None else replace(data, item=run.item)
        size = (one.training.items_per_step, one.training.items_per_micro_batch, of_stage.item)
        if size not in memories:
            memories[size] = run_memory(
                one, of_stage.item, vocabulary_size=data.vocabulary_size, ranks=ranks, device=peak
            )
        found.append(
            PlannedStage(
                first_step=steps.start + 1,
                last_step=steps.stop,
                changes={} if index == 0 else config.stages[index - 1].changes,
                learning_rate=one.optimizer.learning_rate,
                shares={name: float(share) for name, share in drawn_shares(one).items()},
                step=_step(SettledRun(config=one), of_stage, ranks, run, steps),
                memory=memories[size],
            )
        )
    return tuple(found)


def _cost_model(run: ResolvedRun, peak: DevicePeak | None) -> CostModel | None:
    """Returns the run's measured cost model, if it is of this device, and of all layers of the model."""
    found = run.cost_model
    if found is None or run.config.training.layout == "padded":
        return None
    of_all_layers = found.measured_on.layers == run.config.model.shape["layers"]
    return found if of_all_layers and known_device(found.measured_on.device) == peak else None


def _device(name: str | None) -> DevicePeak | None:
    """Returns the named device, or this machine's; None if it has no GPU, or an unknown one.

    Raises: ConfigError for a name that is not known.
    """
    if name is not None:
        return find_device_peak(name)
    return known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _planned_data(
    config: RunConfig, data: RunData, items: int, padding: tuple[Padding, ...], resolved: ResolvedRun | None
) -> PlannedData:
    steps = len(config.span)
    # A part of a run may begin with what an epoch has left in the form before.
    passes = resolved.passes if resolved is not None and resolved.prepared.follows is not None else {}
    sources = tuple(
        PlannedSource(
            source=one.name,
            documents=one.documents,
            sequences=one.sequences,
            items_per_epoch=one.items,
            tokens_per_epoch=one.tokens,
            share=float(one.share),
            steps_per_epoch=float(one.items * steps / (one.share * items)) if one.share else None,
            epochs=passes.get(one.name, float(items * one.share / one.items)),
        )
        for one in data.sources
    )
    longest = config.data.recipe.max_sequence_length
    return PlannedData(
        sources=sources,
        lengths=None if data.lengths is None else length_statistics(data.lengths, pack_length=longest),
        packing_efficiency=data.item.fill,
        packing_factor=float(data.item.sequences),
        epochs=None if data.items_per_epoch is None else items / data.items_per_epoch,
        padding=padding,
        vocabulary_size=data.vocabulary_size,
        assumptions=data.assumptions,
    )


def _padding(config: RunConfig, data: RunData, items: int, work: Work, *, useful: int) -> tuple[Padding, ...]:
    """Returns the padding of the run's packs, and of rows with one sequence each; none if lengths are unknown.

    Args:
        work: on the real tokens of `items` packs or sequences.
        useful: its operations.
    """
    if not data.sources:
        return ()
    recipe = config.data.recipe

    def flops(performed: Work) -> int:
        return step_flops(config.model, vocabulary_size=data.vocabulary_size, work=performed)

    found: list[tuple[str, int, int]] = []
    if config.training.batching == "packs":
        slots = items * data.item.row_slots
        on_padding = data.of_padding.of_items(items, slots=slots - work.slots, sequences=0)
        found.append((f"packs of {data.item.row_slots:,}", slots, flops(on_padding)))
    if data.padded_rows is not None:
        rows, row = round(items * data.padded_rows), recipe.max_sequence_length
        slots = rows * row
        of_row = total_pairs_within(np.array([row]), config.model.windows)
        pairs_within = {window: rows * pairs for window, pairs in of_row.items()}
        dense = replace(work, slots=slots, squared_lengths=slots * row, pairs_within=pairs_within)
        kind = "document" if recipe.kind == "concat" else "sequence"
        found.append((f"one {kind} in each, of {recipe.max_sequence_length:,}", slots, flops(dense) - useful))
    return tuple(
        Padding(
            rows=name,
            slots=slots,
            padding=slots - work.slots,
            share=1.0 - work.slots / slots,
            wasted_flops=wasted,
        )
        for name, slots, wasted in found
    )


def _step(settled: SettledRun, data: RunData, ranks: int, resolved: ResolvedRun | None, steps: range) -> PlannedStep:
    training = settled.config.training
    padded_alike = training.batching == "sequences" and (training.layout, training.policy) == ("padded", "arrival")
    row_slots = data.item.row_slots if training.layout == "packed" or padded_alike else None
    return PlannedStep(
        ranks=ranks,
        layout=training.layout,
        batching=training.batching,
        items=training.items_per_step,
        items_per_micro_batch=training.items_per_micro_batch,
        micro_batches=settled.micro_batches(ranks),
        assignment=training.policy,
        sequences=float(training.items_per_step * data.item.sequences),
        tokens=float(training.items_per_step * data.item.tokens),
        slots=None if row_slots is None else training.items_per_step * row_slots,
        slots_per_micro_batch=None if row_slots is None else training.items_per_micro_batch * row_slots,
        balance=None if resolved is None or ranks == 1 else _balance(resolved, ranks, steps[:_BALANCED_STEPS]),
    )


def _balance(run: ResolvedRun, ranks: int, steps: range) -> Balance | None:
    """Plans the steps; None if nothing costs anything."""
    world = World(rank=0, size=ranks, local_rank=0, device=torch.device("cpu"))
    planner = MicroBatchDataset(run.prepared, run.pipeline_settings(world)).planner
    plans = [planner.plan(step) for step in steps]
    if not all(plan.costs.any() for plan in plans):
        return None
    found = [
        step_balance(plan.costs, plan.assignment, ranks=ranks, each=run.shape.balances_each_micro_batch)
        for plan in plans
    ]
    largest, bound = np.mean(found, axis=0).tolist()
    return Balance(steps=len(steps), largest=largest, bound=bound)


def step_balance(
    costs: Float64[np.ndarray, " items"], assignment: StepAssignment, *, ranks: int, each: bool
) -> tuple[float, float]:
    """Returns the cost that all ranks wait for, and the least that any assignment could have, over the mean rank's.

    Where ranks get equal numbers of items, one of them has the most expensive item, and no less than the least
    expensive others beside it.

    Args:
        each: whether ranks wait for each other in each micro-batch and not only in each step.
    """
    sizes = np.diff(assignment.offsets)
    shares = np.add.reduceat(costs[assignment.items], assignment.offsets[:-1]).reshape(ranks, -1)
    waited = shares.max(axis=0).sum() if each else shares.sum(axis=1).max()
    others = len(costs) // ranks - 1 if (sizes == sizes[0]).all() else 0
    least_first = np.sort(costs)
    mean = costs.sum() / ranks
    return float(waited / mean), max(1.0, float((least_first[-1] + least_first[:others].sum()) / mean))


def _items(config: RunConfig) -> int:
    """Returns the packs or sequences of all steps that the run does itself."""
    order = order_of(config)
    return order.items_before(config.span.stop) - order.items_before(config.span.start)


def _cost(config: RunConfig, data: RunData, flops: int, *, hours: Hours | None) -> PlannedCost:
    parameters = parameters_of(config, data.vocabulary_size)
    items = _items(config)
    tokens = float(items * data.item.tokens)
    return PlannedCost(
        steps=len(config.span),
        sequences=float(items * data.item.sequences),
        tokens=tokens,
        model=f"{config.model.kind} {config.model.preset}",
        is_causal=family_of(config.model).causal,
        parameters=parameters,
        tokens_per_parameter=tokens / parameters,
        compute_optimal_tokens=float(CHINCHILLA_RATIO * parameters),
        flops=flops,
        flops_by_rule=TRAINING_FLOPS * parameters * tokens,
        hours=hours,
    )


def _hours(rate: Rate, flops: int, tokens: float, ranks: int) -> Hours:
    hours, least, most = (flops / (ranks * each * _HOUR) for each in (rate.expected, rate.most, rate.least))
    return Hours(
        on=f"{ranks:,} x {rate.device}",
        hours=hours,
        least=least,
        most=most,
        device_hours=ranks * hours,
        tokens_per_second=tokens / (hours * _HOUR),
        basis=rate.basis,
    )


def _clipping(config: RunConfig) -> str:
    norm = config.training.gradient_clipping
    if norm is None:
        return "off"
    return f"to a norm of {norm:g}, by {config.deepspeed.sharding.clips}"


def _initial_weights(path: Path | None) -> str | None:
    """Returns what is found there; an earlier run may still have to write it."""
    from evenpack.engine.checkpoints.weight_sources import find_weights

    try:
        return None if path is None else str(find_weights(path))
    except CheckpointError as error:
        log.warning("training.initialize_from: %s", error)
        return f"none yet: {path}"
