"""Results as tables for people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from evenpack.console import pairs, percent, table, text
from evenpack.data.order.step_shape import Batching
from evenpack.engine.resolving.run_length import CHINCHILLA_RATIO
from evenpack.launcher.training import TrainingPlan, TrainingReport
from evenpack.progress import format_rate
from evenpack.units import counted

if TYPE_CHECKING:
    from evenpack.engine.memory.rehearsal import RankRehearsal


def evaluation_table(evaluations: Mapping[str, Mapping[str, Any] | None], *, title: str) -> Table:
    """Returns `evaluations_to_json` as a table."""
    rows = []
    for source, found in evaluations.items():
        values = found or {}
        rows.append(
            {
                "source": source,
                "loss": f"{values['loss']:.4f}" if found else None,
                "perplexity": f"{values['perplexity']:.2f}" if found else None,
                "accuracy": percent(values["accuracy"]) if found else None,
                **_next_sentence(values),
                "targets": values.get("targets"),
            }
        )
    return table(rows, title=title)


def aggregate_line(aggregate: Mapping[str, Any]) -> Text:
    """Returns `aggregate_loss` as a line."""
    weights = ", ".join(f"{source} {weight:g}" for source, weight in aggregate["weights"].items())
    return text(f"loss by the weights {weights}: {aggregate['loss']:.4f}")


def _next_sentence(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the columns for a model with next-sentence prediction."""
    if "next_sentence_loss" not in values:
        return {}
    return {
        "next-sentence loss": f"{values['next_sentence_loss']:.4f}",
        "next-sentence accuracy": percent(values["next_sentence_accuracy"]),
    }


def plan_table(plan: TrainingPlan) -> Table:
    """Returns the plan of a run as a table."""
    epochs = ", ".join(f"{epochs:.2f} of {source}" for source, epochs in plan.epochs.items())
    if len(plan.epochs) > 1:
        epochs += f"; {plan.epochs_of_all:.2f} of all sources"
    adjusted = {"adjusted": "\n".join(plan.packing_adjustment)} if plan.packing_adjustment else {}
    packing = f"{percent(plan.packing_efficiency)} efficient, {plan.packing_factor:.3f} sequences per pack"
    if plan.batching == "sequences":
        packing = f"none; {percent(plan.packing_efficiency)} of the longest length on average"
    return pairs(
        adjusted
        | {
            "step": f"{plan.items_per_step} {plan.batching} = {counted(plan.ranks, 'rank')} x "
            f"{plan.micro_batches_per_rank} micro-batches (gradient accumulation) x "
            f"{plan.items_per_micro_batch} {plan.batching}",
            "assignment": plan.assignment,
            "steps": plan.steps,
            "sequences per step": f"{plan.samples_per_step:,.1f} on average",
            "total sequences": f"{plan.steps * plan.samples_per_step:,.0f} on average",
            "slots per step": "as many as its sequences need" if plan.slots_per_step is None else plan.slots_per_step,
            "micro-batch": _shapes(plan),
            "tokens per step": f"{plan.tokens_per_step:,.0f} on average",
            "total tokens": f"{plan.tokens:,.0f} on average",
            "tokens per parameter": f"{plan.tokens_per_parameter:,.3g}, of {plan.parameters:,} parameters "
            f"(compute-optimal for causal models: about {CHINCHILLA_RATIO})",
            "epochs": epochs,
            "packing": packing,
            "gradient clipping": plan.gradient_clipping,
        },
        title="Plan",
    )


def _shapes(plan: TrainingPlan) -> str:
    """Returns the sizes of a micro-batch's arrays, and what they suit badly."""
    from evenpack.data.batches.capacity import ROW_MULTIPLE

    slots, sizes = plan.slots_per_micro_batch, plan.capacity
    if sizes.follows:
        return "as many slots, segments and sequences as it needs"
    origin = "the fullest packs together"
    if sizes.counted is not None:
        is_all = sizes.counted.stop == plan.steps
        origin = (
            f"all {plan.steps:,} steps" if is_all else f"the first {counted(sizes.counted.stop, 'step')}; they may grow"
        )
    shown = [
        "as many slots as its sequences need" if slots is None else f"{slots:,} slots",
        f"room for {sizes.segments:,} segments, {sizes.sequences:,} sequences"
        f"{f', {sizes.targets:,} masked tokens' if sizes.targets else ''} (the most of {origin})",
    ]
    if slots is not None and slots % ROW_MULTIPLE:
        shown.append(
            f"{slots:,} is not a multiple of {ROW_MULTIPLE}, for which a GPU's matrix products are made: change "
            f"{plan.batching}_per_micro_batch, or prepare with another pack_length"
        )
    return "; ".join(shown)


def report_table(report: TrainingReport, *, title: str) -> Table:
    """Returns the report of a finished run as a table."""
    values: dict[str, Any] = {"steps": report.step}
    if report.packing_efficiency is not None and report.packing_factor is not None:
        values["packing, all data"] = (
            f"{percent(report.packing_efficiency)} efficient, {report.packing_factor:.3f} sequences per pack"
        )
    values |= {
        "padding share, these steps": percent(report.padding_share),
        f"tokens/s on {report.ranks} {'rank' if report.ranks == 1 else 'ranks'}": format_rate(report.tokens_per_second),
        **_training_losses(report),
    }
    if report.target is not None:
        values[f"target accuracy {percent(report.target['accuracy'])}"] = _target(report.target)
    kind = "masked-token loss" if report.losses_apart else "loss"
    for source, loss in report.validation_loss.items():
        values[f"validation {kind}, {source}"] = _loss(loss) if loss is not None else "nothing held out"
    return pairs(values, title=title)


def _training_losses(report: TrainingReport) -> dict[str, str]:
    """Of a model with two losses each by itself: its validation loss is of masked tokens alone."""
    if not report.losses_apart:
        return {"first loss": _loss(report.first_loss), "last loss": _loss(report.last_loss)}
    names = {"token_loss": "masked-token loss", "next_sentence_loss": "next-sentence loss"}
    return {
        f"{end} {name}": _loss(report.losses_apart[f"{end}_{key}"])
        for key, name in names.items()
        for end in ("first", "last")
    }


def _target(target: Mapping[str, Any]) -> str:
    if not target["reached"]:
        return "not reached"
    samples, minutes = target["samples"], target["seconds"] / 60
    return f"reached with {percent(target['reached_accuracy'])} after {samples:,} sequences, {minutes:,.2f} minutes"


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "not finite"


def rehearsal_table(found: "RankRehearsal", batching: Batching) -> Table:
    """Returns the first step of one rank as a table."""
    peak = found.memory.peak
    size = f"{_range(found.items)} {batching} and {_range(found.slots)} slots"
    return pairs(
        {
            "micro-batches": f"{len(found.items)}, of {size} each",
            "sequences": found.sequences,
            "tokens": f"{found.tokens:,}, {found.tokens / found.tokens_of_the_mean_rank:.4f} x those of the mean rank",
            "targets": found.targets,
            "cost": f"{found.cost_over_mean:.4f} x the mean rank's; the most expensive rank's is "
            f"{found.largest_cost_over_mean:.4f} x",
            "memory": f"{peak.total / 1e9:,.2f} GB on a GPU at the peak ({peak.phase}), estimated",
            "faked step": f"forward, backward, reduction, update; a gradient of {found.faked_gradients:,} numbers",
        },
        title=f"First step of rank {found.rank:,} of {found.ranks:,}",
    )


def _range(numbers: tuple[int, ...]) -> str:
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"
