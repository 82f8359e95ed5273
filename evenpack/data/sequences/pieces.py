"""Rows made of pieces of documents: the common part of `concat` and `padding`.

A piece is a range of a document's tokens, followed by the end-of-text tokens that fill an atom.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from evenpack.data.config import ConcatRecipe, PaddingRecipe
from evenpack.data.sequences.origins import NO_SEQUENCES, Origins, holding, place_of
from evenpack.data.sequences.view import StoredView
from evenpack.data.tokens.file import TokenFile

_ROWS_AT_ONCE = 1 << 16
"""Rows processed at once when all rows are scanned; bounds the temporaries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The pieces of K rows: P pieces, row by row."""

    documents: Int64[np.ndarray, " P"]
    """Index among the kept documents."""
    starts: Int64[np.ndarray, " P"]
    """First token within the document."""
    tokens: Int64[np.ndarray, " P"]
    """Number of the document's tokens."""
    ends: Int64[np.ndarray, " P"]
    """End-of-text tokens after them: 0 or 1."""
    paddings: Int64[np.ndarray, " P"]
    """End-of-text tokens after that, which are padding."""
    per_row: Int64[np.ndarray, " K"]

    @property
    def slots(self) -> Int64[np.ndarray, " P"]:
        total: Int64[np.ndarray, " P"] = self.tokens + self.ends + self.paddings
        return total

    def segment_begins(self) -> Bool[np.ndarray, " P"]:
        """Returns which pieces begin a segment: neighbours in a document stay together."""
        begins = np.ones(len(self.starts), dtype=bool)
        begins[1:] = (self.documents[1:] != self.documents[:-1]) | (
            self.starts[1:] != self.starts[:-1] + self.tokens[:-1]
        )
        begins[self.first_of_rows] = True
        return begins

    def segments(self) -> tuple[Int64[np.ndarray, " segments"], Int64[np.ndarray, " K"]]:
        """Returns the lengths of all segments, and how many each row has."""
        begins = self.segment_begins()
        return np.add.reduceat(self.slots, np.flatnonzero(begins)), self.sum_by_row(begins)

    def sum_by_row(self, values: np.ndarray) -> Int64[np.ndarray, " K"]:
        """Returns the sum over each row of a value per piece; every row has a piece."""
        sums: Int64[np.ndarray, " K"] = np.add.reduceat(values, self.first_of_rows, dtype=np.int64)
        return sums

    @property
    def first_of_rows(self) -> Int64[np.ndarray, " K"]:
        """Returns the first piece of each row."""
        firsts: Int64[np.ndarray, " K"] = np.cumsum(self.per_row) - self.per_row
        return firsts


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsView(StoredView):
    """Rows of `max_sequence_length` slots, of which only the last one may be shorter.

    With isolation, a row has a segment for each document, and a new one after each boundary of atoms that were not
    neighbours; otherwise it is one segment.
    """

    recipe: ConcatRecipe | PaddingRecipe
    documents: Int64[np.ndarray, " kept"]
    """Ids of the kept documents in the token file, in its order."""

    @property
    @abstractmethod
    def total_slots(self) -> int:
        """Slots of all rows."""

    @abstractmethod
    def find_pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        """Returns the pieces of these rows, which must exist."""

    @abstractmethod
    def rows_near(self, place: int) -> Int64[np.ndarray, " rows"]:
        """Returns all rows that could hold a part of the kept document at `place`, and perhaps a few more."""

    @property
    def document_file(self) -> TokenFile:
        return self.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        if len(sequence_ids) == 0:
            return Origins(documents=sequence_ids, starts=sequence_ids, tokens=sequence_ids, per_sequence=sequence_ids)
        pieces = self.pieces(sequence_ids)
        is_of_a_document = pieces.tokens + pieces.ends > 0  # and not padding alone
        return Origins(
            documents=self.documents[pieces.documents[is_of_a_document]],
            starts=pieces.starts[is_of_a_document],
            tokens=pieces.tokens[is_of_a_document],
            per_sequence=pieces.sum_by_row(is_of_a_document),
        )

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        place = place_of(document, self.documents)
        return NO_SEQUENCES if place is None else holding(self.rows_near(place), self.origins, document)

    def pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        """Returns the pieces of these rows; caches those of the last array, which a batch requests several times."""
        last = self._last_asked
        if not last or last[0][0] is not sequence_ids:
            self._check_ids(sequence_ids)
            last[:] = [(sequence_ids, self.find_pieces(sequence_ids))]
        return last[0][1]

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        stop = self.count if stop is None else stop
        lengths = np.full(stop - start, self.max_sequence_length, dtype=np.int32)
        if start < stop == self.count:
            lengths[-1] = self.total_slots - (self.count - 1) * self.max_sequence_length
        return lengths

    def segments(
        self, sequence_ids: Int64[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " segments"], Int64[np.ndarray, " K"]]:
        if len(sequence_ids) == 0 or not self.recipe.isolate_documents:
            return self._row_lengths(sequence_ids), np.ones_like(sequence_ids)
        return self.pieces(sequence_ids).segments()

    def gather(self, sequence_ids: Int64[np.ndarray, " K"]) -> Integer[np.ndarray, " tokens"]:
        pieces = self.pieces(sequence_ids)
        offsets, _ = self.token_file.spans(self.documents[pieces.documents])
        tokens = self.token_file.gather(*_join_neighbours(offsets + pieces.starts, pieces.tokens))
        filled = pieces.ends + pieces.paddings
        if not filled.any():
            return tokens
        slots = np.full(len(tokens) + filled.sum(), self._end_of_text, dtype=tokens.dtype)
        slots[_first_of_each(pieces.tokens, filled)] = tokens
        return slots

    def statistics(
        self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        lengths = lengths.astype(np.int64)
        if len(sequence_ids) == 0 or not self.recipe.isolate_documents:
            self._check_ids(sequence_ids)
            return np.ones_like(lengths), lengths**2
        segments, per_row = self.pieces(sequence_ids).segments()
        return per_row, np.add.reduceat(segments**2, np.cumsum(per_row) - per_row)

    @cached_property
    def _last_asked(self) -> list[tuple[Int64[np.ndarray, " K"], Pieces]]:
        """At most one pair: row ids, and their pieces."""
        return []

    @cached_property
    def _end_of_text(self) -> int:
        """Returns the token in which each document ends."""
        offsets, lengths = self.token_file.spans(self.documents[:1])
        return int(self.token_file.gather(offsets + lengths - 1, np.ones_like(lengths))[0])

    def _row_lengths(self, sequence_ids: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        self._check_ids(sequence_ids)
        begins = sequence_ids * self.max_sequence_length
        lengths: Int64[np.ndarray, " K"] = np.minimum(self.total_slots - begins, self.max_sequence_length)
        return lengths


def most_segments(view: RowsView) -> int:
    """Returns the most segments of any row of the view, which need not be stored; at least 1."""
    if not view.recipe.isolate_documents:
        return 1
    most = 1
    for start in range(0, view.count, _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, view.count))
        most = max(most, int(view.pieces(rows).segments()[1].max()))
    return most


def padding_of(pieces: Pieces) -> Bool[np.ndarray, " slots"]:
    """Returns which slots of the pieces are padding."""
    return ~_first_of_each(pieces.tokens + pieces.ends, pieces.paddings)


def _first_of_each(first: Int64[np.ndarray, " P"], second: Int64[np.ndarray, " P"]) -> Bool[np.ndarray, " slots"]:
    """Returns True as often as `first` says and False as often as `second` says, alternately."""
    counts = np.stack([first, second], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(first)), counts)


def _join_neighbours(
    offsets: Int64[np.ndarray, " P"], lengths: Int64[np.ndarray, " P"]
) -> tuple[Int64[np.ndarray, " slices"], Int64[np.ndarray, " slices"]]:
    """Returns one slice for pieces that are adjacent in the file, as most are: many short documents are one copy."""
    if len(offsets) == 0:
        return offsets, lengths
    (firsts,) = np.nonzero(np.append(True, offsets[1:] != offsets[:-1] + lengths[:-1]))
    return offsets[firsts], np.add.reduceat(lengths, firsts)
