"""The tables of `evenpack where`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenpack import console
from evenpack.data.where import DocumentVisits, PlacedSequence, StepContent

_MOST_ROWS = 1000
"""Rows of a table; --json has all."""
_TEXT_SHOWN = 60
"""Characters of a text in a table."""


def step_tables(content: StepContent) -> list[Any]:
    """Returns a row for each part of a document in a step."""
    tokens = sum(sequence.tokens for sequence in content.sequences)
    title = (
        f"Step {content.step:,}{' (skipped)' if content.skipped else ''}: {content.packs:,} packs, "
        f"{len(content.sequences):,} sequences, {tokens:,} tokens, order hash {content.order_hash}"
    )
    return _table([row for sequence in content.sequences for row in _rows(sequence)], title=title)


def document_tables(found: DocumentVisits) -> list[Any]:
    """Returns a row for each part of a document in each step that has one."""
    title = f"Document {found.document} of {found.source}: {found.tokens:,} tokens"
    shown = [] if found.text is None else [console.text(found.text)]
    if found.absence is not None:
        return [console.text(f"{title}. No step trains on it: {found.absence}"), *shown]
    if not found.visits:
        return [console.text(f"{title}. The run ends before it reaches the document"), *shown]
    rows = [
        {
            "step": visit.step,
            "epoch": visit.epoch,
            "pack": visit.pack,
            "slot": visit.slot,
            "sequence": visit.sequence,
            "from token": visit.start,
            "tokens": visit.tokens,
            "skipped": visit.skipped,
        }
        for visit in found.visits
    ]
    return [*_table(rows, title=f"{title}, in {len(found.sequences):,} sequences"), *shown]


def _rows(sequence: PlacedSequence) -> Iterator[Mapping[str, Any]]:
    place = {
        "pack": sequence.pack,
        "slot": sequence.slot,
        "source": sequence.source,
        "epoch": sequence.epoch,
        "sequence": sequence.sequence,
    }
    if not sequence.parts:
        yield place | {"document": None, "from token": None, "tokens": sequence.tokens}
    for part in sequence.parts:
        row = place | {"document": part.document, "from token": part.start, "tokens": part.tokens}
        if part.text is not None:
            row["text"] = repr(part.text[:_TEXT_SHOWN])[1:-1]
        yield row


def _table(rows: Sequence[Mapping[str, Any]], *, title: str) -> list[Any]:
    shown: list[Any] = [console.text(title, bold=True), console.table(rows[:_MOST_ROWS])]
    if len(rows) > _MOST_ROWS:
        shown.append(console.text(f"and {len(rows) - _MOST_ROWS:,} more rows; --json shows all"))
    return shown
