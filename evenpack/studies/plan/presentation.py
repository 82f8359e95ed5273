"""The plan of a run as text: what one looks for first, then a table for each section."""

import json
from collections.abc import Iterator

from rich.console import RenderableType

from evenpack.console import pairs, percent, text
from evenpack.engine.memory.estimate import FREE_SHARE
from evenpack.studies.columns import Column, table_of, wide_table_of
from evenpack.studies.plan.memory import RunMemory
from evenpack.studies.plan.plan import CHINCHILLA_RATIO, TRAINING_FLOPS, Hours, PlannedData, PlannedStep, RunPlan
from evenpack.units import counted

_ROW_MULTIPLE = 16
"""Multiple of rows for which matrix products on tensor cores are made, in FP8 too."""

_PARTS_OF_MEMORY = ("parameters", "gradients", "optimizer", "activations", "head", "buffers", "total")

_UNITS = ((1.0, "hours"), (1 / 60, "minutes"), (1 / 3600, "seconds"))
"""Hours of each unit in which a duration is shown."""


_STAGE_COLUMNS = (
    Column("steps", lambda stage: f"{stage.first_step:,} to {stage.last_step:,}"),
    Column("changes", lambda stage: "\n".join(f"{key} {value}" for key, value in stage.changes.items()) or "none"),
    Column("a step", lambda stage: step_size(stage.step)),
    Column("tokens/step", "step.tokens", ",.0f"),
    Column("learning rate", "learning_rate", "g"),
    Column("memory (GB)", lambda stage: stage.memory.total / 1e9, ",.3g"),
)


def plan_shown(plan: RunPlan, *, shell_line: str | None = None) -> Iterator[RenderableType]:
    """Returns the texts and tables of a plan; `shell_line` starts it."""
    yield pairs(_at_a_glance(plan), title=f"{plan.run} on {counted(plan.step.ranks, 'rank')}")
    yield from _data(plan)
    yield pairs(step_rows(plan.step), title="A step of the first stage" if plan.stages else "A step")
    if plan.stages:
        yield table_of(plan.stages, _STAGE_COLUMNS, title="Stages")
    yield from memory_shown(plan.memory, batching=plan.step.batching)
    yield pairs(_cost(plan), title="Cost")
    yield from _start(plan, shell_line)


def _at_a_glance(plan: RunPlan) -> dict[str, str]:
    cost = plan.cost
    epochs = "" if plan.data.epochs is None else f", {plan.data.epochs:,.3g} epochs"
    return {
        "tokens": f"{count(cost.tokens)} in {cost.steps:,} steps of {count(plan.step.tokens)}{epochs}",
        "memory": _memory(plan),
        "time": _unknown_time(plan) if cost.hours is None else _time(cost.hours),
    }


def _memory(plan: RunPlan) -> str:
    found, batching = plan.memory, plan.step.batching
    size = f"{found.total / 1e9:,.3g} GB" if found.total >= 1e9 else f"{found.total / 1e6:,.3g} MB"
    shown = f"{size} for each rank, at ZeRO {plan.start.deepspeed['zero_optimization']['stage']}"
    if found.capacity is None:
        return f"{shown}, estimated for a GPU"
    shown += f"; {'fits into' if found.fits else 'too much for'} {found.device} ({found.capacity / 1e9:,.0f} GB)"
    if found.largest is None:
        return shown
    largest = f"{found.largest.items_per_micro_batch:,} {batching} at once"
    return f"{shown}, as do {largest}" if found.fits else f"{shown}; {largest} fit"


def _unknown_time(plan: RunPlan) -> str:
    if plan.memory.device is not None:
        return "not known: rates were measured in BF16 alone; give --mfu"
    return "not known: name a GPU, as --device h100; on a CPU, small micro-batches of prepared data are timed"


def _time(found: Hours) -> str:
    unit, name = next(((size, name) for size, name in _UNITS if found.hours >= size), _UNITS[-1])
    shown = f"{found.hours / unit:,.3g} {name}"
    if found.least < found.most:
        shown += f" ({found.least / unit:,.3g} to {found.most / unit:,.3g})"
    return f"{shown} on {found.on}"


def _data(plan: RunPlan) -> Iterator[RenderableType]:
    data, batching = plan.data, plan.step.batching
    columns = (
        Column("source"),
        Column("documents"),
        Column("sequences"),
        Column("tokens", "tokens_per_epoch"),
        *((Column("packs", "items_per_epoch"),) if batching == "packs" else ()),
        Column("of a step", "share", ".2%"),
        Column("steps/epoch", "steps_per_epoch", ",.1f"),
        Column("epochs", "epochs", ",.3f"),
    )
    if data.sources:
        yield table_of(data.sources, columns, title="Data, by source, in an epoch")
    yield pairs(_facts(data, batching), title="" if data.sources else "Data")
    if data.padding:
        wasted = (
            Column("rows"),
            Column("slots"),
            Column("padding"),
            Column("share", form=".2%"),
            Column("wasted FLOPs", "wasted_flops", ".3g"),
            Column("of useful ones", lambda one: one.wasted_flops / plan.cost.flops, ".2%"),
        )
        yield table_of(data.padding, wasted, title="Padding, over the run")


def _facts(data: PlannedData, batching: str) -> dict[str, str]:
    shown = {}
    if data.assumptions:
        shown["assumed"] = "\n".join(data.assumptions)
    lengths = data.lengths
    if lengths is not None:
        shown["lengths"] = (
            f"{lengths.shortest:,} to {lengths.longest:,}: mean {lengths.mean:,.1f}, median {lengths.median:,}, "
            f"90 % up to {lengths.percentile_90:,}, 99 % up to {lengths.percentile_99:,}"
        )
    if batching == "sequences":
        shown["packing"] = f"none; {percent(data.packing_efficiency)} of the longest length on average"
    elif data.sources:
        shown["packing"] = f"{percent(data.packing_efficiency)} full, {data.packing_factor:.3f} sequences per pack"
    return shown | {"vocabulary": f"{data.vocabulary_size:,}"}


def step_rows(step: PlannedStep) -> dict[str, str]:
    """Returns what a step is, by name."""
    slots = "as many as its sequences need" if step.slots is None else f"{step.slots:,}"
    shown = {
        "step": step_size(step),
        "holds": f"{step.tokens:,.0f} tokens and {step.sequences:,.1f} sequences on average; slots: {slots}",
        "micro-batch": _shapes(step),
        "assignment": step.assignment,
    }
    if step.balance is not None:
        found = step.balance
        shown["balance"] = (
            f"the most expensive rank costs {100 * (found.largest - 1):.2f} % more than the mean one, over "
            f"{counted(found.steps, 'step')}; no assignment can be below {100 * (found.bound - 1):.2f} %"
        )
    return shown


def step_size(step: PlannedStep) -> str:
    """Returns the size of a step, and how ranks and micro-batches divide it."""
    return (
        f"{step.items:,} {step.batching} = {counted(step.ranks, 'rank')} x {step.micro_batches:,} "
        f"(gradient accumulation) x {step.items_per_micro_batch:,} {step.batching}"
    )


def _shapes(step: PlannedStep) -> str:
    """Returns the sizes of a micro-batch's arrays, and what they suit badly."""
    slots, batching = step.slots_per_micro_batch, step.batching
    if slots is None:
        return "as many slots as its sequences need"
    shown = f"{slots:,} slots"
    if slots % _ROW_MULTIPLE:
        shown += (
            f"; {slots:,} is not a multiple of {_ROW_MULTIPLE}, for which a GPU's matrix products are made: change "
            f"{batching}_per_micro_batch, or prepare with another pack_length"
        )
    return shown


def memory_shown(found: RunMemory, *, batching: str) -> Iterator[RenderableType]:
    """Returns the memory of each phase of a step, and what fits."""
    size, peak = found.size, found.memory.peak
    scale, unit = (1e-9, "GB") if peak.total >= 1e9 else (1e-6, "MB")
    columns = (
        Column("phase", lambda phase: f"{phase.phase} (peak)" if phase is peak else phase.phase),
        *(Column(part, form=",.2f", scale=scale) for part in _PARTS_OF_MEMORY),
    )
    title = f"Memory of one rank of {found.ranks:,}, estimated for a GPU, in {unit}"
    yield wide_table_of(found.memory.phases, columns, title=title)
    yield text(
        f"A micro-batch is {found.items_per_micro_batch:,} {batching}: {size.slots:,} slots, "
        f"{size.head_rows:,} rows of logits."
    )
    if lines := [*_what_fits(found, batching), *(f"Note: {note}" for note in found.notes)]:
        yield text("\n".join(lines))


def _what_fits(found: RunMemory, batching: str) -> Iterator[str]:
    if found.usable is None or found.capacity is None:
        return
    yield (
        f"It {'fits' if found.fits else 'does not fit'} into {found.usable / 1e9:,.1f} GB of "
        f"{found.device or 'the device'}'s {found.capacity / 1e9:,.0f}, {float(FREE_SHARE):.0%} being left for what is "
        "not estimated."
    )
    if found.largest is not None:
        largest = f"training.{batching}_per_micro_batch={found.largest.items_per_micro_batch}"
        yield f"The largest micro-batch that fits and divides the step: {largest}, {found.largest.total / 1e9:,.2f} GB"
    else:
        yield (
            "Not even a micro-batch of one does. Try model.activation_checkpointing=true, deepspeed.zero_stage=1 or 3 "
            "(not with LAMB), shorter packs (data.pack_length), a device with more memory, or more ranks"
        )


def _cost(plan: RunPlan) -> dict[str, str]:
    cost = plan.cost
    per_parameter = f"{cost.tokens_per_parameter:,.3g}"
    if cost.is_causal:
        per_parameter += (
            f"; compute-optimal are about {CHINCHILLA_RATIO}, {count(cost.compute_optimal_tokens)} tokens, "
            f"{cost.compute_optimal_tokens / cost.tokens:,.3g} x this run's"
        )
    shown = {
        "length": f"{cost.steps:,} steps, {cost.tokens:,.0f} tokens, {cost.sequences:,.0f} sequences",
        "model": f"{cost.model}, {cost.parameters:,} parameters",
        "tokens per parameter": per_parameter,
        "operations": f"{cost.flops:.4g} FLOPs counted on the model; {cost.flops_by_rule:.4g} by {TRAINING_FLOPS} N D",
    }
    if cost.hours is not None:
        found = cost.hours
        rates = f"{found.device_hours:,.3g} device-hours, {found.tokens_per_second:,.0f} tokens/s"
        shown["time"] = f"{_time(found)}: {rates}"
        shown["measured"] = found.basis
    return shown


def _start(plan: RunPlan, shell_line: str | None) -> Iterator[RenderableType]:
    start = plan.start
    shown = {"gradient clipping": start.gradient_clipping}
    if start.initial_weights is not None:
        shown["initial weights"] = start.initial_weights
    if start.packing_adjustment:
        shown["adjusted"] = "\n".join(start.packing_adjustment)
    shown["devices"] = start.devices or f"{counted(plan.step.ranks, 'rank')}, without machines: nothing is started"
    yield pairs(shown, title="What would be started")
    if shell_line is not None:
        yield text(shell_line)
    yield text(f"DeepSpeed gets {json.dumps(start.deepspeed, indent=2)}")


def count(value: float) -> str:
    """Returns a number in billions or millions, the usual units of models and corpora."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:,.4g} {name}"
    return f"{value:,.0f}"
