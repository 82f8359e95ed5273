"""The budget of a run: its batch, its epochs, its operations, the hours on a device, and the cost of padding.

Tokens are real ones. Operations are counted on the model over real tokens (`models/cost.py`), as for MFU.
Steps are computed by training's own function.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from evenpack.data.order.step_shape import Batching
from evenpack.data.prepare.tokens_dir import find_tokens
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import RunMemory, run_memory
from evenpack.engine.resolving.data_facts import implausible_epochs
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.resolving.settle import SettledRun, parameters_of, settle
from evenpack.errors import ConfigError, NotPreparedError
from evenpack.kernels.visible_pairs import total_pairs_within
from evenpack.models.common.device_peaks import DevicePeak, find_device_peak
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of
from evenpack.studies.budget.data import (
    RunData,
    SourceData,
    data_of_counts,
    data_of_run,
    data_of_tokens,
    estimated_data,
)
from evenpack.studies.budget.options import BudgetOptions
from evenpack.studies.budget.scaling import TRAINING_FLOPS, optimally_trained

_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """One optimizer update over all devices: micro-batch x accumulation x devices."""

    batching: Batching
    """The items that the next two count."""
    per_micro_batch: int
    per_step: int
    micro_batches: int
    """Micro-batches of each device (gradient accumulation)."""
    devices: int
    sequences: float
    """Sequences on average, as are the tokens."""
    slots: int
    """Slots of packs, or of single sequences, if each is a row of the longest length."""
    tokens: float


@dataclass(frozen=True, kw_only=True)
class SourceBudget:
    """The part of a source in a run."""

    source: str
    share: float
    """Fraction of the packs or sequences of a step."""
    items_per_epoch: int
    tokens_per_epoch: int
    steps_per_epoch: float
    """Steps of the run per epoch of this source; the steps draw from the other sources as well."""
    epochs: float
    maximum_epochs: float | None
    """Limit of the run file; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """The duration of a run on devices that reach a given fraction of their peak."""

    device: str
    peak_tflops: float
    """Dense peak at the run's precision."""
    mfu: float
    hours: float
    device_hours: float
    tokens_per_second: float


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
    wasted_device_hours: float | None
    """Device hours lost to padding; None without a device."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget of a run before it is started."""

    run: str
    batch: EffectiveBatch
    steps: int
    epochs: float | None
    """Epochs of all sources together; None where the data is not known."""
    samples: float
    """Sequences, on average, as are the tokens."""
    tokens: float
    sources: tuple[SourceBudget, ...]
    model: str
    is_causal: bool
    parameters: int
    tokens_per_parameter: float
    compute_optimal_tokens: float
    """Tokens by the rule of 20 per parameter."""
    flops: int
    """Operations of all steps, counted on the model."""
    flops_by_rule: float
    """Operations by the rule of 6 for each parameter and token."""
    time: Hours | None
    """Duration; None without a device."""
    padding: tuple[Padding, ...]
    memory: RunMemory
    adjustment: tuple[str, ...]
    """The packing adjustment of the run file's values."""
    assumptions: tuple[str, ...]
    """Assumptions, where the data is not prepared."""
    implausible: str | None
    """Warning of sources that are read more than a hundred times; None if there are none."""


def budget_of(config: RunConfig, options: BudgetOptions) -> Budget:
    """Computes the budget of a run.

    It is exact over prepared data, and over documents tokenised in `data.tokens_dir`; otherwise it is estimated from
    counts, or from assumptions.

    Raises: ConfigError if the devices cannot divide a step, for an unknown device, or for a length that follows from
    data that is not prepared; DataError for data that was prepared from another section.
    """
    peak = None if options.device is None else find_device_peak(options.device)
    settled, data = settled_data(
        config,
        vocabulary_size=options.vocabulary_size,
        corpus_tokens=options.corpus_tokens,
        corpus_documents=options.corpus_documents,
    )
    config = settled.config
    batch = _batch(settled, data, devices=options.devices)
    steps = config.training.planned_steps
    items = steps * config.training.items_per_step
    work = data.useful.of_items(
        items, slots=round(items * data.item.tokens), sequences=round(items * data.item.sequences)
    )
    flops = step_flops(config.model, vocabulary_size=data.vocabulary_size, work=work)
    parameters = parameters_of(config, data.vocabulary_size)
    tokens = float(items * data.item.tokens)
    time = None if peak is None else _hours(config, peak, options, flops=flops, tokens=tokens)
    sources = tuple(_source(source, config, items) for source in data.sources)
    return Budget(
        run=config.run.name,
        batch=batch,
        steps=steps,
        epochs=None if data.items_per_epoch is None else items / data.items_per_epoch,
        samples=float(items * data.item.sequences),
        tokens=tokens,
        sources=sources,
        model=f"{config.model.kind} {config.model.preset}",
        is_causal=family_of(config.model).causal,
        parameters=parameters,
        tokens_per_parameter=tokens / parameters,
        compute_optimal_tokens=optimally_trained(float(parameters)).tokens,
        flops=flops,
        flops_by_rule=TRAINING_FLOPS * parameters * tokens,
        time=time,
        padding=_padding(config, data, items, work, useful=flops, time=time),
        memory=run_memory(config, data.item, vocabulary_size=data.vocabulary_size, ranks=options.devices, device=peak),
        adjustment=settled.adjustment,
        assumptions=data.assumptions,
        implausible=implausible_epochs(config, {source.source: source.epochs for source in sources}),
    )


def settled_data(
    config: RunConfig,
    *,
    vocabulary_size: int | None,
    corpus_tokens: int | None = None,
    corpus_documents: int | None = None,
) -> tuple[SettledRun, RunData]:
    """Returns the run in packs and steps, and its data; the arguments are as in `BudgetOptions`.

    Raises: ConfigError for a vocabulary size of data that has one, or a length that follows from data that is not
    prepared; DataError for data that was prepared from another section.
    """
    if corpus_tokens is not None and corpus_documents is not None:
        data = data_of_counts(config, tokens=corpus_tokens, documents=corpus_documents, vocabulary_size=vocabulary_size)
    else:
        prepared = _prepared(config)
        if prepared is not None:
            _refuse_vocabulary_size(vocabulary_size, prepared.vocabulary_size)
            run = resolve(config, prepared)
            return run.settled, data_of_run(run)
        tokens = find_tokens(config.data)
        if tokens is None:
            data = estimated_data(config, vocabulary_size=vocabulary_size)
        else:
            data = data_of_tokens(config, tokens)
            _refuse_vocabulary_size(vocabulary_size, data.vocabulary_size)
    return settle(config, data), data


def _prepared(config: RunConfig) -> PreparedData | None:
    try:
        return PreparedData.open(config.prepared_dir, config.data)
    except NotPreparedError:
        return None


def _refuse_vocabulary_size(given: int | None, known: int) -> None:
    if given is not None:
        raise ConfigError(
            f"--vocabulary-size is for data that is not prepared; this run's vocabulary has {known:,} entries: leave "
            "the option out"
        )


def _batch(settled: SettledRun, data: RunData, *, devices: int) -> EffectiveBatch:
    training = settled.config.training
    return EffectiveBatch(
        batching=training.batching,
        per_micro_batch=training.items_per_micro_batch,
        per_step=training.items_per_step,
        micro_batches=settled.micro_batches(devices),
        devices=devices,
        sequences=float(training.items_per_step * data.item.sequences),
        slots=training.items_per_step * data.item.row_slots,
        tokens=float(training.items_per_step * data.item.tokens),
    )


def _source(source: SourceData, config: RunConfig, items: int) -> SourceBudget:
    return SourceBudget(
        source=source.name,
        share=float(source.share),
        items_per_epoch=source.items,
        tokens_per_epoch=source.tokens,
        steps_per_epoch=float(source.items / (source.share * config.training.items_per_step)),
        epochs=float(items * source.share / source.items),
        maximum_epochs=config.data.sources[source.name].maximum_epochs,
    )


def _hours(config: RunConfig, peak: DevicePeak, options: BudgetOptions, *, flops: int, tokens: float) -> Hours:
    dtype = torch.bfloat16 if config.training.precision == "bf16_autocast" else torch.float32
    of_one = peak.require_flops(dtype)
    device_hours = flops / (of_one * options.mfu) / _HOUR
    hours = device_hours / options.devices
    return Hours(
        device=peak.name,
        peak_tflops=of_one / 1e12,
        mfu=options.mfu,
        hours=hours,
        device_hours=device_hours,
        tokens_per_second=tokens / (hours * _HOUR),
    )


def _padding(
    config: RunConfig, data: RunData, items: int, work: Work, *, useful: int, time: Hours | None
) -> tuple[Padding, ...]:
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
            wasted_device_hours=None if time is None else time.device_hours * wasted / useful,
        )
        for name, slots, wasted in found
    )
