"""Recommends a recipe that turns documents into rows, by the cost of each at a row length."""

from dataclasses import dataclass

import numpy as np

from evenpack.data.packing import LengthHistogram, pack

_NEGLIGIBLE_SHARE = 0.02
"""Fraction of slots that does not justify rows in which documents are cut anywhere."""


@dataclass(frozen=True, kw_only=True)
class RecipeCost:
    """The cost of one pass over all documents as rows of one length."""

    recipe: str
    rows: int
    padding_share: float
    """Fraction of slots that hold no token of a document or its end."""
    steps_over_concat: float
    """Rows, and so steps of equal batches, relative to `concat`."""


@dataclass(frozen=True, kw_only=True)
class RecipeAdvice:
    """The recommended recipes, by the scarce resource."""

    max_sequence_length: int
    mean_document_length: float
    """Mean tokens of a document, including end-of-text."""
    documents_cut: float
    """Fraction of documents that are longer than a row."""
    costs: tuple[RecipeCost, ...]
    scarce_data: str
    scarce_data_reason: str
    scarce_time: str
    scarce_time_reason: str


def advise_recipe(documents: LengthHistogram, *, max_sequence_length: int) -> RecipeAdvice:
    """Compares `documents`, `concat` and `padding` at rows of `max_sequence_length`, where an atom is a row.

    The advice is by what the recipes cost and cut. What they train is not part of it: the study `atom_size_mini`
    (docs/chunking.md) shows no recipe to be better than another on held-out documents, by three seeds of one order of
    rows.

    Args:
        documents: lengths in tokens of whole documents, including end-of-text.
    """
    costs = {cost.recipe: cost for cost in _costs(documents, max_sequence_length)}
    mean = documents.tokens / documents.sequences
    lengths = np.arange(1, documents.longest + 1)
    cut = float(documents.counts[: documents.longest][lengths > max_sequence_length].sum() / documents.sequences)
    padding, packed = costs["padding"], costs["documents"]
    position = "longer" if mean > max_sequence_length else "shorter"
    data = (
        "documents",
        f"documents are {position} than rows on average; this recipe cuts only those longer than a row and isolates "
        f"all, for {100 * packed.padding_share:.1f} % of padding; the recipe padding takes "
        f"{100 * (padding.steps_over_concat - 1):.0f} % more steps than concat. Which of them trains the better model "
        "is not shown (docs/chunking.md)",
    )
    extra = packed.steps_over_concat - 1
    if extra <= _NEGLIGIBLE_SHARE:
        time = ("documents", f"only {100 * extra:.1f} % more steps than concat, and documents stay isolated")
    else:
        time = ("concat", f"no padding; packs of whole pieces would take {100 * extra:.1f} % more steps")
    return RecipeAdvice(
        max_sequence_length=max_sequence_length,
        mean_document_length=mean,
        documents_cut=cut,
        costs=tuple(costs.values()),
        scarce_data=data[0],
        scarce_data_reason=data[1],
        scarce_time=time[0],
        scarce_time_reason=time[1],
    )


def _costs(documents: LengthHistogram, length: int) -> list[RecipeCost]:
    lengths = np.arange(1, documents.longest + 1)
    counts = documents.counts[: documents.longest]
    pieces = documents.fitted(length, "split").histogram
    packed = pack(pieces, "longest_pack_first", pack_length=length).packs
    concatenated = -(-documents.tokens // length)
    padded = int(counts @ -(-(lengths - 1) // (length - 1)))
    ends = int(counts @ ((lengths - 1) // (length - 1) + ((lengths - 1) % (length - 1) > 0)))
    text = documents.tokens - documents.sequences
    held = {"documents": documents.tokens, "concat": documents.tokens, "padding": text + ends}
    rows = {"documents": packed, "concat": concatenated, "padding": padded}
    return [
        RecipeCost(
            recipe=name,
            rows=rows[name],
            padding_share=1 - held[name] / (rows[name] * length),
            steps_over_concat=rows[name] / concatenated,
        )
        for name in rows
    ]
