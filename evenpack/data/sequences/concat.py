"""The recipe `concat`: a split's documents concatenated into a stream that is cut exactly at `max_sequence_length`.

With an atom, the stream is first cut into atoms, and rows are cut from the shuffled atoms.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.config import ConcatRecipe
from evenpack.data.sequences.accounting import TokenAccounting
from evenpack.data.sequences.atoms import places_of, rows_of_atoms, shuffled_atoms, uniform_parts
from evenpack.data.sequences.pieces import Pieces, RowsView, most_segments
from evenpack.data.tokens.file import TokenFile


@dataclass(frozen=True, kw_only=True, eq=False)
class _StreamView(RowsView):
    """Rows made of a stream of documents."""

    recipe: ConcatRecipe
    stream_starts: Int64[np.ndarray, " kept_plus_1"]
    """Start of each kept document in the stream, and the stream's length."""

    @property
    def total_slots(self) -> int:
        return int(self.stream_starts[-1])

    def _stretches(self, place: int, size: int) -> Int64[np.ndarray, " stretches"]:
        """Returns the cuts of the stream, of `size` tokens each, that hold the kept document at `place`."""
        begin, end = self.stream_starts[place : place + 2].tolist()
        return np.arange(begin // size, -(-end // size))


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcatView(_StreamView):
    """Rows are cuts of the stream, in its order.

    A cut covers pieces of one or more documents. These need not be neighbours in the token file: documents of other
    splits, and dropped ones, may be between them.
    """

    first_documents: Int64[np.ndarray, " cuts_plus_1"]
    """Kept document of each cut's first token, and the number of kept documents."""

    def find_pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        begins = sequence_ids * self.max_sequence_length
        ends = np.minimum(begins + self.max_sequence_length, self.total_slots)
        # The next cut's first document belongs to this cut too, unless it begins where this one ends.
        following = self.first_documents[sequence_ids + 1]
        past = following + (self.stream_starts[following] < ends)
        return _cover(self.stream_starts, begins, ends, self.first_documents[sequence_ids], past)

    def rows_near(self, place: int) -> Int64[np.ndarray, " rows"]:
        return self._stretches(place, self.max_sequence_length)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledConcatView(_StreamView):
    """Rows made of atoms of the stream, in the order in which they are trained."""

    atom_order: Integer[np.ndarray, " atoms"]
    """The atom at each rank of the order; the tokens after the last whole atom stay last."""

    def find_pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        atom = self.recipe.atom
        assert atom is not None, "a view of this kind is made for an atom"
        row = self.max_sequence_length
        parts = uniform_parts(sequence_ids, self.atom_order, row=row, atom=atom, total_slots=self.total_slots)
        begins = parts.atoms * atom + parts.begins
        ends = begins + parts.slots
        first = np.searchsorted(self.stream_starts, begins, side="right") - 1
        past = np.searchsorted(self.stream_starts, ends, side="left")
        pieces = _cover(self.stream_starts, begins, ends, first, past)
        firsts_of_rows = np.cumsum(parts.per_row) - parts.per_row
        return replace(pieces, per_row=np.add.reduceat(pieces.per_row, firsts_of_rows) if len(begins) else begins)

    def rows_near(self, place: int) -> Int64[np.ndarray, " rows"]:
        atom, seed = self.recipe.atom, self.recipe.seed
        assert atom is not None, "a view of this kind is made for an atom"
        assert seed is not None, "the recipe settles it"
        places = places_of(self._stretches(place, atom), moved=self.total_slots // atom, seed=seed)
        return rows_of_atoms(places, row=self.max_sequence_length, atom=atom, total_slots=self.total_slots)


def build_concat(
    recipe: ConcatRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
) -> ConcatView | ShuffledConcatView:
    """Returns the stream of a split's documents, ids in ascending order."""
    _, lengths = token_file.spans(documents)
    too_short = lengths < recipe.minimum_document_length
    stream_starts = np.append(0, np.cumsum(lengths[~too_short]))
    tokens_kept = int(stream_starts[-1])
    begins = np.arange(0, tokens_kept, recipe.max_sequence_length)
    accounting = TokenAccounting(
        documents_read=len(documents),
        documents_kept=len(stream_starts) - 1,
        documents_too_short=int(too_short.sum()),
        documents_too_long=0,
        tokens_read=int(lengths.sum()),
        tokens_kept=tokens_kept,
        tokens_cut=0,
        tokens_too_short=int(lengths[too_short].sum()),
        tokens_too_long=0,
        sequences=len(begins),
    )
    view: ConcatView | ShuffledConcatView
    if recipe.atom is not None:
        assert recipe.seed is not None, "the recipe settles it"
        order = shuffled_atoms(-(-tokens_kept // recipe.atom), moved=tokens_kept // recipe.atom, seed=recipe.seed)
        view = ShuffledConcatView(
            recipe=recipe,
            token_file=token_file,
            accounting=accounting,
            max_segments_per_sequence=1,
            directory=None,
            documents=documents[~too_short],
            stream_starts=stream_starts,
            atom_order=order,
        )
    else:
        holders = np.searchsorted(stream_starts, begins, side="right") - 1
        view = ConcatView(
            recipe=recipe,
            token_file=token_file,
            accounting=accounting,
            max_segments_per_sequence=1,
            directory=None,
            documents=documents[~too_short],
            stream_starts=stream_starts,
            first_documents=np.append(holders, len(stream_starts) - 1),
        )
    return replace(view, max_segments_per_sequence=most_segments(view))


def _cover(
    stream_starts: Int64[np.ndarray, " kept_plus_1"],
    begins: Int64[np.ndarray, " Q"],
    ends: Int64[np.ndarray, " Q"],
    first: Int64[np.ndarray, " Q"],
    past: Int64[np.ndarray, " Q"],
) -> Pieces:
    """Returns the pieces of the documents `first` to before `past` in each of the cuts of the stream."""
    counts = past - first
    before = np.cumsum(counts) - counts
    documents = np.arange(counts.sum()) + np.repeat(first - before, counts)
    origins = stream_starts[documents]
    starts = np.maximum(origins, np.repeat(begins, counts))
    stops = np.minimum(stream_starts[documents + 1], np.repeat(ends, counts))
    nothing = np.zeros_like(starts)
    return Pieces(
        documents=documents,
        starts=starts - origins,
        tokens=stops - starts,
        ends=nothing,
        paddings=nothing,
        per_row=counts,
    )
