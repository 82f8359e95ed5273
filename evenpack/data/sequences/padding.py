"""The recipe `padding`: no atom holds two documents.

A document's tokens, without its end-of-text, are cut into pieces of one less than an atom, each closed by an
end-of-text. Its tail, the remaining tokens, is padded with end-of-text: to an atom, or where an atom is longer than a
row, to whole rows. A tail of whole rows is not closed, because that would make a row of padding.

Source: A.3 of the text that `atoms` names; an earlier version of it pads all tails to the atom.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int64, Integer

from evenpack.data.config import PaddingRecipe
from evenpack.data.sequences.accounting import TokenAccounting
from evenpack.data.sequences.atoms import RowParts, places_of, rows_of_atoms, shuffled_atoms, uniform_parts
from evenpack.data.sequences.pieces import Pieces, RowsView, most_segments, padding_of
from evenpack.data.sequences.view import PaddingCounts
from evenpack.data.tokens.file import TokenFile


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingView(RowsView):
    """Rows of atoms of single documents, in the order in which they are trained."""

    recipe: PaddingRecipe
    first_atoms: Int64[np.ndarray, " kept_plus_1"]
    """The first atom of each kept document, and the number of atoms."""
    atom_order: Integer[np.ndarray, " atoms"]
    """The atom at each rank of the order."""
    row_ends: Int64[np.ndarray, " places"]
    """Number of rows that the atoms up to each rank of the order fill; empty where all fill as many."""

    @property
    def total_slots(self) -> int:
        if len(self.row_ends):
            return int(self.row_ends[-1]) * self.max_sequence_length
        return int(self.first_atoms[-1]) * self.recipe.atom

    def padding(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"]:
        return padding_of(self.pieces(sequence_ids))

    def padding_counts(self, sequence_ids: Int64[np.ndarray, " K"]) -> PaddingCounts:
        if len(sequence_ids) == 0:
            return PaddingCounts(sequence_ids, sequence_ids, sequence_ids)
        pieces = self.pieces(sequence_ids)
        firsts = pieces.first_of_rows
        if self.recipe.isolate_documents:
            firsts = np.flatnonzero(pieces.segment_begins())
        lengths, paddings = (np.add.reduceat(values, firsts) for values in (pieces.slots, pieces.paddings))
        squares = np.zeros_like(pieces.paddings)
        squares[firsts] = lengths**2 - (lengths - paddings) ** 2
        no_target = np.zeros_like(pieces.paddings)
        no_target[firsts] = pieces.tokens[firsts] + pieces.ends[firsts] == 0  # a segment's first token is none anyway
        tokens = pieces.sum_by_row(pieces.paddings)
        return PaddingCounts(tokens, tokens - pieces.sum_by_row(no_target), pieces.sum_by_row(squares))

    def find_pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        parts = self._parts(sequence_ids)
        documents = np.searchsorted(self.first_atoms, parts.atoms, side="right") - 1
        _, lengths = self.token_file.spans(self.documents[documents])
        content = self.recipe.atom - 1
        starts = (parts.atoms - self.first_atoms[documents]) * content
        in_atom = np.minimum(lengths - 1 - starts, content)
        tokens = np.clip(in_atom - parts.begins, 0, parts.slots)
        ends = (parts.begins <= in_atom) & (in_atom < parts.begins + parts.slots)
        return Pieces(
            documents=documents,
            starts=starts + np.minimum(parts.begins, in_atom),
            tokens=tokens,
            ends=ends.astype(np.int64),
            paddings=parts.slots - tokens - ends,
            per_row=parts.per_row,
        )

    def rows_near(self, place: int) -> Int64[np.ndarray, " rows"]:
        atoms = np.arange(self.first_atoms[place], self.first_atoms[place + 1])
        places = places_of(atoms, moved=len(self.atom_order), seed=self.recipe.seed)
        if not len(self.row_ends):
            row, atom = self.max_sequence_length, self.recipe.atom
            return rows_of_atoms(places, row=row, atom=atom, total_slots=self.total_slots)
        begins = np.where(places > 0, self.row_ends[places - 1], 0)
        return np.concatenate([np.arange(*span) for span in zip(begins, self.row_ends[places], strict=True)])

    def _parts(self, rows: Int64[np.ndarray, " K"]) -> RowParts:
        row = self.max_sequence_length
        if not len(self.row_ends):
            return uniform_parts(rows, self.atom_order, row=row, atom=self.recipe.atom, total_slots=self.total_slots)
        places = np.searchsorted(self.row_ends, rows, side="right")
        before = np.where(places > 0, self.row_ends[places - 1], 0)
        return RowParts(
            atoms=self.atom_order[places].astype(np.int64),
            begins=(rows - before) * row,
            slots=np.full(len(rows), row),
            per_row=np.ones_like(rows),
        )


def build_padding(
    recipe: PaddingRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
) -> PaddingView:
    """Lays out the documents of a split, ids in ascending order."""
    _, lengths = token_file.spans(documents)
    too_short = lengths < recipe.minimum_document_length
    content = recipe.atom - 1
    full, tails = np.divmod(lengths[~too_short] - 1, content)
    first_atoms = np.append(0, np.cumsum(full + (tails > 0)))
    unit = recipe.atom if recipe.pad_tails_to == "atom" else min(recipe.atom, recipe.max_sequence_length)
    tail_slots = -(-tails // unit) * unit
    atoms = int(first_atoms[-1])
    order = shuffled_atoms(atoms, moved=atoms, seed=recipe.seed)
    row_ends = np.zeros(0, dtype=np.int64)
    if unit < recipe.atom:
        slots = np.full(atoms, recipe.atom)
        slots[first_atoms[1:][tails > 0] - 1] = tail_slots[tails > 0]
        row_ends = np.cumsum(slots[order] // recipe.max_sequence_length)
    total_slots = int((full * recipe.atom + tail_slots).sum())
    tail_ends = tail_slots > tails
    own_ends = int((tail_ends | (tails == 0)).sum())
    ends = int(full.sum() + tail_ends.sum())
    accounting = TokenAccounting(
        documents_read=len(documents),
        documents_kept=int((~too_short).sum()),
        documents_too_short=int(too_short.sum()),
        documents_too_long=0,
        tokens_read=int(lengths.sum()),
        tokens_kept=int((lengths[~too_short] - 1).sum()) + ends,
        tokens_cut=int((~too_short).sum()) - own_ends,
        tokens_too_short=int(lengths[too_short].sum()),
        tokens_too_long=0,
        sequences=-(-total_slots // recipe.max_sequence_length),
        tokens_added_ends=ends - own_ends,
        tokens_subsequence_ends=int(full.sum()),
        tokens_tail_ends=int(tail_ends.sum()),
        padding_slots=int((tail_slots - tails - tail_ends).sum()),
    )
    view = PaddingView(
        recipe=recipe,
        token_file=token_file,
        accounting=accounting,
        max_segments_per_sequence=1,
        directory=None,
        documents=documents[~too_short],
        first_atoms=first_atoms,
        atom_order=order,
        row_ends=row_ends,
    )
    return replace(view, max_segments_per_sequence=most_segments(view))
