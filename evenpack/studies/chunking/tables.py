"""A chunking study as tables."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.chunking.compare import ArmRow
from evenpack.studies.chunking.config import ChunkingSection
from evenpack.studies.columns import Column, table_of, wide_table_of
from evenpack.studies.runs.arms import confidence_text

_ARM = Column("arm", "arm.name")
_FINAL = Column("final", form=".2f")
_FINAL_STEP = Column("final step", "final_step", ".2f")
_DOCUMENTS = Column("documents alone", "documents", ".2f")
_OWN_REAL_TOKENS = Column("own rows, per real token", "own_rows_real_tokens", ".2f")
_OWN_TEXT = Column("own rows, text alone", "own_rows_text", ".2f")
_TRAINED = (
    _ARM,
    Column("atom", lambda row: row.arm.atom_label if row.arm.atom else None),
    Column("seeds", lambda row: len(row.seeds)),
    Column("steps/epoch", lambda row: round(row.steps_per_epoch, 1)),
    _FINAL,
    Column("last 10 %", "last_tenth", ".2f"),
    Column("rank in recipe", "rank_in_recipe", ".2f"),
    Column("rank of all", "rank_at_length", ".2f"),
    _FINAL_STEP,
)
_RECIPES = (
    Column("recipe", "arm.recipe"),
    Column("MSL", "arm.max_sequence_length"),
    Column("batch", "arm.rows_per_step"),
    Column("steps"),
    Column("padding", "padding_share", ".2%"),
    Column("tokens/step", "tokens_per_step", ",.0f"),
    _FINAL_STEP,
    _FINAL,
    _DOCUMENTS,
)


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
    natural = [row for row in rows if row.arm.is_natural]
    if len(natural) > 1:
        shown.append(wide_table_of(natural, _RECIPES, title="Recipes side by side, with atoms of one row (as table 3)"))
    return shown


def by_length(rows: Sequence[ArmRow]) -> Iterator[tuple[int, list[ArmRow]]]:
    """Yields the rows of each MSL, shortest first."""
    for length in sorted({row.arm.max_sequence_length for row in rows}):
        yield length, [row for row in rows if row.arm.max_sequence_length == length]


def _trained(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    return wide_table_of(
        arms,
        [*_TRAINED, *_difference("last_tenth_difference", confidence), *_verdict("last_tenth", arms)],
        title=(
            f"MSL {length}: training perplexity (as table 2). final, rank: over the last 1 %, and each 1 %, of the "
            f"last epoch; difference: of the last 10 % from {reference}, seed by seed"
        ),
    )


def _at_steps(length: int, arms: Sequence[ArmRow]) -> RenderableType:
    steps = [_at_step(step) for step in arms[0].at_steps]
    title = f"MSL {length}: training perplexity, mean over the 1 % of an epoch that ends at a step"
    return table_of(arms, [_ARM, *steps], title=title)


def _at_step(step: int) -> Column:
    return Column(f"step {step:,}", lambda row: row.at_steps[step], ".2f")


def _held_out(length: int, arms: Sequence[ArmRow], reference: str, confidence: str) -> RenderableType:
    own_rows = [Column("own rows, as trained", "own_rows", ".2f")]
    if any(row.own_rows_real_tokens for row in arms):
        own_rows.append(_OWN_REAL_TOKENS)
    if any(row.own_rows_text for row in arms):
        own_rows.append(_OWN_TEXT)
    return wide_table_of(
        arms,
        [
            _ARM,
            _DOCUMENTS,
            *_difference("documents_difference", confidence),
            *_verdict("documents", arms),
            *own_rows,
        ],
        title=(
            f"MSL {length}: perplexity on held-out documents. documents alone: the same targets for all arms; own "
            f"rows: in rows of the arm's own recipe; difference: of documents alone from {reference}"
        ),
    )


def _difference(path: str, confidence: str) -> list[Column]:
    return [Column("difference", f"{path}.mean", "+.2f"), Column(confidence, f"{path}.interval", "+.2f")]


def _verdict(name: str, arms: Sequence[ArmRow]) -> list[Column]:
    """Returns the column of verdicts, which says for how many comparisons they are corrected; none without any."""
    compared = sum(getattr(row, f"{name}_verdict") is not None for row in arms)
    return [Column(f"of {compared} (Holm)", f"{name}_verdict", missing="")] if compared else []
