"""`evenpack budget` as tables."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from evenpack.console import pairs, percent, text
from evenpack.engine.config import CHINCHILLA_RATIO
from evenpack.engine.memory.text import memory_text
from evenpack.studies.budget.scaling import SERVING_FLOPS, TRAINING_FLOPS, Allocation, Serving
from evenpack.studies.budget.study import Budget, EffectiveBatch, SourceBudget
from evenpack.studies.columns import Column, table_of
from evenpack.units import counted

_MODELS = (
    Column("parameters", lambda model: _count(model.parameters)),
    Column("of the first", "share", ".2%"),
    Column("tokens", lambda model: _count(model.tokens)),
    Column("per parameter", "tokens_per_parameter", ",.1f"),
    Column("training", lambda model: _flops(model.training_flops)),
    Column("serving", lambda model: _flops(model.serving_flops)),
    Column("total", lambda model: _flops(model.total_flops)),
    Column("", lambda model: "fewest" if model.is_least else ""),
)


def budget_tables(budget: Budget) -> Iterator[RenderableType]:
    """Returns the tables of a budget, from the step to the hours."""
    if budget.adjustment:
        yield text("\n".join(budget.adjustment))
    yield pairs(_batch(budget.batch), title=f"Batch of {budget.run}")
    yield pairs(_length(budget), title="Length")
    if budget.sources:
        yield _sources(budget)
    yield pairs(_compute(budget), title="Compute")
    if budget.padding:
        yield _padding(budget)
    yield text(memory_text(budget.memory, batching=budget.batch.batching))
    if budget.assumptions:
        yield text("\n".join(["Assumptions:", *(f"  {one}" for one in budget.assumptions)]))
    if budget.implausible is not None:
        yield text(budget.implausible, bold=True)


def optimum_table(flops: float, found: Allocation) -> Table:
    """Returns the table of `compute_optimal`."""
    return pairs(
        {
            "rule": f"C = {TRAINING_FLOPS} N D operations, D = {CHINCHILLA_RATIO} N tokens for N parameters",
            "parameters": _count(found.parameters),
            "tokens": f"{_count(found.tokens)}, {CHINCHILLA_RATIO} per parameter",
        },
        title=f"Best use of {_flops(flops)}",
    )


def serving_table(serving: Serving) -> Table:
    """Returns models of the same loss; the one with the fewest operations is marked."""
    return table_of(
        serving.models,
        _MODELS,
        title=f"Models of loss {serving.loss:.4f}, {_count(serving.served_tokens)} tokens served at {SERVING_FLOPS} "
        f"operations per parameter; by {serving.law.source}",
    )


def _batch(batch: EffectiveBatch) -> dict[str, str]:
    kind = batch.batching
    return {
        "step": f"{batch.per_step:,} {kind} = micro-batch of {batch.per_micro_batch:,} {kind} x "
        f"{batch.micro_batches:,} (accumulation) x {counted(batch.devices, 'device')}",
        "sequences": f"{batch.sequences:,.1f} on average",
        "slots": f"{batch.slots:,}",
        "tokens": f"{batch.tokens:,.0f} on average",
    }


def _length(budget: Budget) -> dict[str, str]:
    epochs = "unknown: the data is not prepared" if budget.epochs is None else f"{budget.epochs:,.3f}"
    optimum = f" (compute-optimal: about {CHINCHILLA_RATIO})" if budget.is_causal else ""
    return {
        "steps": f"{budget.steps:,}",
        "epochs": epochs,
        "sequences": f"{budget.samples:,.0f}",
        "tokens": f"{budget.tokens:,.0f}",
        "tokens per parameter": f"{budget.tokens_per_parameter:,.3g}{optimum}",
    }


def _sources(budget: Budget) -> Table:
    columns = (
        Column("source"),
        Column("of a step", "share", ".2%"),
        Column(f"{budget.batch.batching} per epoch", "items_per_epoch"),
        Column("tokens per epoch", "tokens_per_epoch"),
        Column("steps per epoch", "steps_per_epoch", ",.1f"),
        Column("epochs", _epochs),
    )
    return table_of(budget.sources, columns, title="Sources")


def _epochs(source: SourceBudget) -> str:
    bound = source.maximum_epochs
    if bound is None:
        return f"{source.epochs:,.3f}"
    return f"{source.epochs:,.3f}, {'above' if source.epochs > bound else 'at most'} {bound:g}"


def _compute(budget: Budget) -> dict[str, str]:
    rule = budget.flops_by_rule
    shown = {
        "model": budget.model,
        "parameters": f"{budget.parameters:,}",
        "operations": f"{_flops(budget.flops)} counted on the model; {_flops(rule)} by {TRAINING_FLOPS} N D",
    }
    if budget.is_causal:
        shown["compute-optimal tokens"] = (
            f"{_count(budget.compute_optimal_tokens)}, "
            f"{budget.compute_optimal_tokens / budget.tokens:,.3g} x those of this run"
        )
    time = budget.time
    if time is not None:
        shown["on"] = (
            f"{budget.batch.devices:,} x {time.device}, {time.peak_tflops:,.1f} TFLOP/s dense each at "
            f"{percent(time.mfu)} MFU: {time.tokens_per_second:,.0f} tokens/s"
        )
        shown["hours"] = f"{time.hours:,.3g}"
        shown["device-hours"] = f"{time.device_hours:,.3g}"
    return shown


def _padding(budget: Budget) -> Table:
    columns = (
        Column("rows"),
        Column("slots"),
        Column("padding"),
        Column("share", form=".2%"),
        Column("wasted operations", lambda one: _flops(one.wasted_flops)),
        Column("of useful operations", lambda one: one.wasted_flops / budget.flops, ".2%"),
        *([] if budget.time is None else [Column("device-hours", "wasted_device_hours", ",.3g")]),
    )
    return table_of(budget.padding, columns, title="Cost of padding")


def _flops(value: int | float) -> str:
    return f"{value:.4g} FLOPs"


def _count(value: int | float) -> str:
    """Returns a number in billions or millions, the usual units of models and corpora."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:,.4g} {name}"
    return f"{value:,.0f}"
