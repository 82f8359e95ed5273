"""A chunking study as tables."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.chunking.compare import ArmRow
from evenpack.studies.chunking.config import ChunkingSection
from evenpack.studies.statistics.paired import PairedDifference, Spread


def comparison_tables(rows: Sequence[ArmRow], section: ChunkingSection) -> list[RenderableType]:
    """Returns each length's arms in training and on held-out documents, and recipes side by side.

    A note before a run ends.
    """
    if not rows:
        return [console.text("No run of the compared phase has finished.")]
    shown: list[RenderableType] = []
    for length, arms in by_length(rows):
        reference = section.reference.replace("{msl}", str(length))
        confidence = f"{100 * (1 - 2 * section.significance):.3g} % interval"
        shown += [_trained(length, arms, reference, confidence), _at_steps(length, arms)]
        if any(row.own_rows or row.documents for row in arms):
            shown.append(_held_out(length, arms, reference, confidence))
    natural = [_recipe(row) for row in rows if row.arm.is_natural]
    if len(natural) > 1:
        shown.append(console.WideTable(rows=natural, title="Recipes side by side, with atoms of one row (as table 3)"))
    return shown


def by_length(rows: Sequence[ArmRow]) -> Iterator[tuple[int, list[ArmRow]]]:
    """Yields the rows of each MSL, shortest first."""
    for length in sorted({row.arm.max_sequence_length for row in rows}):
        yield length, [row for row in rows if row.arm.max_sequence_length == length]


def _trained(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    return console.WideTable(
        rows=[
            {
                "arm": row.arm.name,
                "atom": row.arm.atom_label if row.arm.atom else None,
                "seeds": len(row.seeds),
                "steps/epoch": round(row.steps_per_epoch, 1),
                "final": _spread(row.final),
                "rank in recipe": _spread(row.rank_in_recipe),
                "rank of all": _spread(row.rank_at_length),
                "final step": _spread(row.final_step),
                "difference": _mean(row.difference),
                confidence: _interval(row.difference),
            }
            for row in arms
        ],
        title=(
            f"MSL {length}: training perplexity (as table 2). final, rank: over the last 1 %, and each 1 %, of the "
            f"last epoch; difference: of final from {reference}, seed by seed"
        ),
    )


def _at_steps(length: int, arms: Sequence[ArmRow]) -> RenderableType:
    return console.table(
        [{"arm": row.arm.name, **{f"step {step:,}": _spread(at) for step, at in row.at_steps.items()}} for row in arms],
        title=f"MSL {length}: training perplexity, mean over the 1 % of an epoch that ends at a step",
    )


def _held_out(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    has_padding = any(row.own_rows_real_tokens for row in arms)
    real_tokens = "own rows, per real token"
    return console.WideTable(
        rows=[
            {
                "arm": row.arm.name,
                "documents alone": _spread(row.documents),
                "difference": _mean(row.documents_difference),
                confidence: _interval(row.documents_difference),
                "own rows, as trained": _spread(row.own_rows),
                **({real_tokens: _spread(row.own_rows_real_tokens)} if has_padding else {}),
            }
            for row in arms
        ],
        title=(
            f"MSL {length}: perplexity on held-out documents. documents alone: the same targets for all arms; own "
            f"rows: in rows of the arm's own recipe; difference: of documents alone from {reference}"
        ),
    )


def _recipe(row: ArmRow) -> dict[str, Any]:
    return {
        "recipe": row.arm.recipe,
        "MSL": row.arm.max_sequence_length,
        "batch": row.arm.rows_per_step,
        "steps": row.steps,
        "padding": console.percent(row.padding_share),
        "tokens/step": round(row.tokens_per_step),
        "final step": _spread(row.final_step),
        "final": _spread(row.final),
        "documents alone": _spread(row.documents),
    }


def _spread(spread: Spread | None) -> str | None:
    if spread is None:
        return None
    return f"{spread.mean:.2f}" + ("" if spread.deviation is None else f" ± {spread.deviation:.2f}")


def _mean(difference: PairedDifference | None) -> str | None:
    return None if difference is None else f"{difference.mean:+.2f}"


def _interval(difference: PairedDifference | None) -> str | None:
    if difference is None or difference.low is None or difference.high is None:
        return None
    return f"{difference.low:+.2f} to {difference.high:+.2f}"
