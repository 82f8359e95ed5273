"""A chunking study as tables."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.chunking.compare import ArmRow
from evenpack.studies.chunking.config import ChunkingSection
from evenpack.studies.runs.arms import confidence_text, difference_text, interval_text, spread_text

_DECIMALS = 2
"""Decimals of a perplexity."""


def comparison_tables(rows: Sequence[ArmRow], section: ChunkingSection) -> list[RenderableType]:
    """Returns each length's arms in training and on held-out documents, and recipes side by side.

    A note before a run ends.
    """
    if not rows:
        return [console.text("No run of the compared phase has finished.")]
    shown: list[RenderableType] = []
    for length, arms in by_length(rows):
        reference = section.reference.replace("{msl}", str(length))
        confidence = confidence_text(section.significance)
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
                "final": spread_text(row.final, _DECIMALS),
                "rank in recipe": spread_text(row.rank_in_recipe, _DECIMALS),
                "rank of all": spread_text(row.rank_at_length, _DECIMALS),
                "final step": spread_text(row.final_step, _DECIMALS),
                "difference": difference_text(row.difference, _DECIMALS),
                confidence: interval_text(row.difference, _DECIMALS),
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
        [
            {"arm": row.arm.name, **{f"step {step:,}": spread_text(at, _DECIMALS) for step, at in row.at_steps.items()}}
            for row in arms
        ],
        title=f"MSL {length}: training perplexity, mean over the 1 % of an epoch that ends at a step",
    )


def _held_out(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    has_padding = any(row.own_rows_real_tokens for row in arms)
    real_tokens = "own rows, per real token"
    return console.WideTable(
        rows=[
            {
                "arm": row.arm.name,
                "documents alone": spread_text(row.documents, _DECIMALS),
                "difference": difference_text(row.documents_difference, _DECIMALS),
                confidence: interval_text(row.documents_difference, _DECIMALS),
                "own rows, as trained": spread_text(row.own_rows, _DECIMALS),
                **({real_tokens: spread_text(row.own_rows_real_tokens, _DECIMALS)} if has_padding else {}),
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
        "final step": spread_text(row.final_step, _DECIMALS),
        "final": spread_text(row.final, _DECIMALS),
        "documents alone": spread_text(row.documents, _DECIMALS),
    }
