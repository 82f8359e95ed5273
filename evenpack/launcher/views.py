"""Results as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from evenpack.engine.reporting.metrics import format_rate
from evenpack.launcher.console import pairs, percent, table, text
from evenpack.launcher.training import TrainingPlan, TrainingReport
from evenpack.studies.lengths.distance import HistogramDistance
from evenpack.studies.lengths.statistics import LengthRange, LengthStatistics
from evenpack.studies.packing.packing import PackingRow, PaddingRow
from evenpack.studies.packing.recommendation import Recommendation

_BAR_CELLS = 40


def splits_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """`Manifest.summary`."""
    shown = []
    for row in rows:
        full = bool(row["packs"])
        shown.append(
            {
                "source": row["source"],
                "split": row["split"],
                "documents": row["documents"],
                "sequences": row["sequences"],
                "tokens": row["tokens"],
                "cut": row["tokens_cut"],
                "dropped": row["tokens_dropped"],
                "packs": row["packs"],
                "efficiency": percent(row["packing_efficiency"]) if full else None,
                "factor": f"{row['packing_factor']:.3f}" if full else None,
                "packed by": row["packing_algorithm"],
            }
        )
    return table(shown, title=title)


def evaluation_table(evaluations: Mapping[str, Mapping[str, Any] | None], *, title: str) -> Table:
    """`evaluations_to_json`."""
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


def _next_sentence(values: Mapping[str, Any]) -> dict[str, str]:
    """Columns that only a model with next-sentence prediction has."""
    if "next_sentence_loss" not in values:
        return {}
    return {
        "next-sentence loss": f"{values['next_sentence_loss']:.4f}",
        "next-sentence accuracy": percent(values["next_sentence_accuracy"]),
    }


def lengths_table(statistics: LengthStatistics, *, origin: str, pack_length: int) -> Table:
    """Lengths and what padding would cost."""
    return pairs(
        {
            "sequences": statistics.sequences,
            "tokens": statistics.tokens,
            "length": f"shortest {statistics.shortest:,}, mean {statistics.mean:,.1f}, median {statistics.median:,}, "
            f"90 % up to {statistics.percentile_90:,}, 99 % up to {statistics.percentile_99:,}, "
            f"longest {statistics.longest:,}",
            f"padded to {pack_length:,}": f"{percent(statistics.padding_share)} of all slots would be padding; "
            f"packing can be up to {statistics.speed_up_limit:.2f} times as fast",
        },
        title=f"Lengths of {origin}",
    )


def histogram_table(ranges: Sequence[LengthRange], *, sequences: int) -> Table:
    """One bar for each range of lengths."""
    most = max(bar.sequences for bar in ranges)
    rows = [
        {
            "tokens": f"{bar.shortest:,} to {bar.longest:,}",
            "sequences": bar.sequences,
            "share": percent(bar.sequences / sequences),
            "": "█" * round(_BAR_CELLS * bar.sequences / most),
        }
        for bar in ranges
    ]
    return table(rows)


def distance_table(found: HistogramDistance) -> Table:
    """Lengths against those of another histogram."""
    return pairs(
        {
            "there": f"{found.sequences:,} sequences, mean {found.mean_length:,.1f}, longest {found.longest:,}",
            "total variation": f"{found.total_variation:.4f}: this share of the sequences would have to change length",
            "largest CDF gap": f"{found.largest_cdf_gap:.4f}: between the shares of sequences up to a length",
        },
        title=f"Lengths against those of {found.origin}",
    )


def packing_table(rows: Sequence[PackingRow], *, pack_length: int) -> Table:
    """Algorithms at several depths."""
    shown = [
        {
            "algorithm": row.algorithm,
            "depth limit": _limit(row.depth_limit),
            "depth": row.depth,
            "strategies": row.strategies,
            "packs": row.packs,
            "bound": row.lower_bound,
            "efficiency": f"{100 * row.efficiency:.3f} %",
            "padding": row.padding,
            "factor": f"{row.packing_factor:.3f}",
            "above bound": f"{100 * row.gap:.4f} %",
            "CPU ms": f"{1000 * row.cpu_seconds:.1f}",
        }
        for row in rows
    ]
    return table(shown, title=f"Packs of {pack_length:,} slots")


def depth_curves_table(
    curves: Mapping[str, Sequence[PackingRow]], fullest: Sequence[PackingRow] = (), *, title: str
) -> Table:
    """Efficiency and speed-up over padding: a line for each curve, a column for each limit of depth.

    `fullest`, one row for each curve, is what `auto` reaches without a limit.
    """
    shown = []
    for index, (name, rows) in enumerate(curves.items()):
        cells = {_limit(row.depth_limit): _full_and_fast(row) for row in rows}
        shown.append({"": name, **cells, **({"auto, none": _full_and_fast(fullest[index])} if fullest else {})})
    return table(shown, title=title)


def _full_and_fast(row: PackingRow) -> str:
    return f"{100 * row.efficiency:.1f} % {row.speed_up:.2f}x"


def sorted_batches_table(rows: Sequence[PaddingRow]) -> Table:
    """Padding instead of packing."""
    shown = [
        {
            "batch size": f"{row.batch_size:,}",
            "slots": row.slots,
            "efficiency": percent(row.efficiency),
            "speed-up": f"{row.speed_up:.3f}",
        }
        for row in rows
    ]
    return table(shown, title="For comparison: sorted by length, cut into batches, each padded to its longest")


def recommendation_text(found: Recommendation) -> Text:
    """What to write into the run file."""
    lines = [
        f"Recommended: data.pack_length={found.pack_length} ({found.reason}), data.packing.algorithm=auto: "
        f"{percent(found.efficiency)} full"
    ]
    if found.sufficient_depth is not None:
        lines.append(
            f"Where a model wants few sequences a pack: data.packing.max_sequences_per_pack={found.sufficient_depth} "
            f"still fills {percent(found.efficiency_at_depth)}"
        )
    return text("\n".join(lines))


def _limit(depth: int | None) -> str:
    return "none" if depth is None else f"{depth}"


def plan_table(plan: TrainingPlan) -> Table:
    """What a run will do."""
    epochs = ", ".join(f"{epochs:.2f} of {source}" for source, epochs in plan.epochs.items())
    adjusted = {"adjusted": "\n".join(plan.packing_adjustment)} if plan.packing_adjustment else {}
    packing = f"{percent(plan.packing_efficiency)} efficient, {plan.packing_factor:.3f} sequences a pack"
    if plan.batching == "sequences":
        packing = f"none; {percent(plan.packing_efficiency)} of the longest length on average"
    return pairs(
        adjusted
        | {
            "step": f"{plan.items_per_step} {plan.batching} = {plan.ranks} ranks x {plan.micro_batches_per_rank} "
            f"micro-batches (gradient accumulation) x {plan.items_per_micro_batch} {plan.batching}",
            "assignment": plan.assignment,
            "steps": plan.steps,
            "slots a step": "as many as its sequences need" if plan.slots_per_step is None else plan.slots_per_step,
            "tokens a step": f"{plan.tokens_per_step:,.0f} on average",
            "tokens in all": f"{plan.tokens:,.0f} on average",
            "epochs": epochs,
            "packing": packing,
        },
        title="Plan",
    )


def report_table(report: TrainingReport, *, title: str) -> Table:
    """The end of a run."""
    values: dict[str, Any] = {
        "steps": report.step,
        "packing efficiency": percent(report.packing_efficiency),
        "packing factor": f"{report.packing_factor:.3f} sequences a pack",
        "padding share": percent(report.padding_share),
        "tokens/s": format_rate(report.tokens_per_second),
        "first loss": _loss(report.first_loss),
        "last loss": _loss(report.last_loss),
    }
    for source, loss in report.validation_loss.items():
        values[f"validation loss, {source}"] = _loss(loss) if loss is not None else "nothing held out"
    return pairs(values, title=title)


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "not finite"
