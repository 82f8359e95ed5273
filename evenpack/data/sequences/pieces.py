"""Rows made of pieces of documents: the recipes `concat` and `padding`.

A piece is a range of a document's tokens, followed by the end-of-text tokens that fill an atom. An atom is the unit
that is shuffled before rows are made: a split's slots are cut into atoms, the atoms are shuffled by a keyed
permutation, and their concatenation is cut into rows. The size of an atom divides the size of a row, so that a row
holds several, or is a multiple of it.

concat     A split's documents concatenated into a stream that is cut exactly at `max_sequence_length`, or first into
           atoms.
padding    No atom holds two documents. A document's tokens, without its end-of-text, are cut into pieces of one less
           than an atom, each closed by an end-of-text. Its tail, the remaining tokens, is padded with end-of-text: to
           an atom, or where an atom is longer than a row, to whole rows. A tail of whole rows is not closed, because
           that would make a row of padding.

Source: "Optimizing Packing and Shuffling Strategies for Enhanced Performance in Generative Language Models", A.3; an
earlier version of it pads all tails to the atom.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from evenpack.data.keys import derive_key
from evenpack.data.permutation import permute, sequence_id_type
from evenpack.data.ranges import ranges
from evenpack.data.recipes import ConcatRecipe, PaddingRecipe
from evenpack.data.sequences.view import Origins, SequenceContent, SequenceCounts, StoredView, TokenAccounting
from evenpack.data.tokens.file import TokenFile

_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 1 << 16
"""Rows processed at once when all rows are scanned; bounds the temporaries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowParts:
    """The parts of atoms that K rows hold: Q parts, row by row."""

    atoms: Int64[np.ndarray, " Q"]
    begins: Int64[np.ndarray, " Q"]
    """First slot within the atom."""
    slots: Int64[np.ndarray, " Q"]
    per_row: Int64[np.ndarray, " K"]


def shuffled_atoms(count: int, *, moved: int, seed: int) -> Integer[np.ndarray, " atoms"]:
    """Returns the atom at each rank of the order, in the smallest type; those from `moved` on keep their ranks."""
    order = np.arange(count, dtype=sequence_id_type(count))
    for start in range(0, moved, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, moved))
        keys = np.full(len(places), derive_key(seed))
        order[start : start + len(places)] = permute(places, np.full(len(places), moved), keys)
    return order


def uniform_parts(
    rows: Int64[np.ndarray, " K"], order: Integer[np.ndarray, " atoms"], *, row: int, atom: int, total_slots: int
) -> RowParts:
    """Returns the parts of these rows, where all atoms have one size, except for a last one that may be shorter.

    Args:
        row: slots of a row.
        atom: slots of an atom.
    """
    part, per_row = min(row, atom), max(1, row // atom)
    begins = rows * row
    counts = np.minimum(per_row, -(-(total_slots - begins) // part))
    if per_row > 1:
        within_row = ranges(np.zeros_like(counts), counts)
        begins = np.repeat(begins, counts) + within_row * part
    places, within = np.divmod(begins, atom)
    slots = np.minimum(total_slots - begins, part)
    return RowParts(atoms=order[places].astype(np.int64), begins=within, slots=slots, per_row=counts)


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
        return self.tokens + self.ends + self.paddings

    def segment_begins(self, *, isolates_documents: bool) -> Bool[np.ndarray, " P"]:
        """Returns which pieces begin a segment, whose first token is no target.

        Each row begins one, and with `isolates_documents` each piece that does not go on where the one before it ended.
        """
        begins = np.zeros(len(self.starts), dtype=bool)
        if isolates_documents:
            begins[1:] = (self.documents[1:] != self.documents[:-1]) | (
                self.starts[1:] != self.starts[:-1] + self.tokens[:-1]
            )
        begins[self.first_of_rows] = True
        return begins

    def sum_by_row(self, values: np.ndarray) -> Int64[np.ndarray, " K"]:
        """Returns the sum over each row of a value per piece; every row has a piece."""
        return np.add.reduceat(values, self.first_of_rows, dtype=np.int64)

    @property
    def first_of_rows(self) -> Int64[np.ndarray, " K"]:
        """Returns the first piece of each row."""
        return np.cumsum(self.per_row) - self.per_row


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsView(StoredView):
    """Rows of `max_sequence_length` slots; only the last one may be shorter.

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
    def closings(self, pieces: Pieces) -> Int64[np.ndarray, " P"]:
        """Returns the end-of-text tokens of each piece that close its text: 0 or 1."""

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        if self.recipe.isolate_documents or "padding" in self.traits or self.recipe.end_of_text_in_loss != "all":
            return self._counts(self._pieces(sequence_ids), lengths.astype(np.int64, copy=False))
        self._check_ids(sequence_ids)
        return SequenceCounts.of_single_segments(lengths)

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        pieces = self._pieces(sequence_ids)
        return SequenceContent(
            counts=self._counts(pieces, pieces.sum_by_row(pieces.slots)),
            tokens=self._gather(pieces),
            left_out=self._left_out(pieces),
        )

    def left_out(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"] | None:
        """Returns `SequenceContent.left_out` of the rows."""
        return self._left_out(self._pieces(sequence_ids))

    def _counts(self, pieces: Pieces, lengths: Int64[np.ndarray, " K"]) -> SequenceCounts:
        begins = pieces.segment_begins(isolates_documents=self.recipe.isolate_documents)
        firsts, slots, segments = np.flatnonzero(begins), pieces.slots, pieces.sum_by_row(begins)
        targets, predicts_all = lengths - segments, self.recipe.end_of_text_in_loss == "all"
        if not predicts_all:
            left_out = self._ends_left_out(pieces)
            is_first = begins & (left_out == slots)  # the first token of a segment is no target anyway
            targets -= pieces.sum_by_row(left_out - is_first)
        return SequenceCounts(
            lengths=lengths,
            segment_lengths=np.add.reduceat(slots, firsts),
            segments=segments,
            targets=targets,
            padding=np.add.reduceat(pieces.paddings, firsts) if "padding" in self.traits else None,
            predicts_padding=predicts_all,
        )

    def _left_out(self, pieces: Pieces) -> Bool[np.ndarray, " tokens"] | None:
        if self.recipe.end_of_text_in_loss == "all":
            return None
        left_out = self._ends_left_out(pieces)
        return ~_first_of_each(pieces.slots - left_out, left_out)

    def _ends_left_out(self, pieces: Pieces) -> Int64[np.ndarray, " P"]:
        """Returns the end-of-text tokens at the end of each piece that are not predicted."""
        return pieces.paddings + (self.closings(pieces) if self.recipe.end_of_text_in_loss == "none" else 0)

    @property
    def document_file(self) -> TokenFile:
        return self.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        pieces = self._pieces(sequence_ids)
        is_of_a_document = pieces.tokens + pieces.ends > 0  # and not padding alone
        return Origins(
            documents=self.documents[pieces.documents[is_of_a_document]],
            starts=pieces.starts[is_of_a_document],
            tokens=pieces.tokens[is_of_a_document],
            per_sequence=pieces.sum_by_row(is_of_a_document),
        )

    def _pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> Pieces:
        self._check_ids(sequence_ids)
        return self.find_pieces(sequence_ids)

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        stop = self.count if stop is None else stop
        lengths = np.full(stop - start, self.max_sequence_length, dtype=np.int32)
        if start < stop == self.count:
            lengths[-1] = self.total_slots - (self.count - 1) * self.max_sequence_length
        return lengths

    def _gather(self, pieces: Pieces) -> Integer[np.ndarray, " tokens"]:
        offsets, _ = self.token_file.spans(self.documents[pieces.documents])
        tokens = self.token_file.gather(*_join_neighbours(offsets + pieces.starts, pieces.tokens))
        filled = pieces.ends + pieces.paddings
        if not filled.any():
            return tokens
        slots = np.full(len(tokens) + filled.sum(), self._end_of_text, dtype=tokens.dtype)
        slots[_first_of_each(pieces.tokens, filled)] = tokens
        return slots

    @cached_property
    def _end_of_text(self) -> int:
        """Returns the token in which each document ends."""
        offsets, lengths = self.token_file.spans(self.documents[:1])
        return int(self.token_file.gather(offsets + lengths - 1, np.ones_like(lengths))[0])


def most_segments(view: RowsView) -> int:
    """Returns the most segments of any row of the view, which need not be stored; at least 1."""
    if not view.recipe.isolate_documents:
        return 1
    most = 1
    for start in range(0, view.count, _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, view.count))
        most = max(most, int(view.counts(rows, view.lengths(start, start + len(rows))).segments.max()))
    return most


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _StreamView(RowsView):
    """Rows made of a stream of documents."""

    recipe: ConcatRecipe
    stream_starts: Int64[np.ndarray, " kept_plus_1"]
    """Start of each kept document in the stream, and the stream's length."""

    @property
    def total_slots(self) -> int:
        return int(self.stream_starts[-1])

    def closings(self, pieces: Pieces) -> Int64[np.ndarray, " P"]:
        lengths = np.diff(self.stream_starts)[pieces.documents]
        closes: Bool[np.ndarray, " P"] = pieces.starts + pieces.tokens == lengths
        return closes.astype(np.int64)


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
        tokens_read=int(lengths.sum()),
        tokens_kept=tokens_kept,
        tokens_too_short=int(lengths[too_short].sum()),
        sequences=len(begins),
    )
    common: dict[str, Any] = {
        "recipe": recipe,
        "token_file": token_file,
        "accounting": accounting,
        "documents": documents[~too_short],
        "stream_starts": stream_starts,
    }
    view: ConcatView | ShuffledConcatView
    if recipe.atom is None:
        holders = np.searchsorted(stream_starts, begins, side="right") - 1
        view = ConcatView(**common, first_documents=np.append(holders, len(stream_starts) - 1))
    else:
        assert recipe.seed is not None, "the recipe settles it"
        order = shuffled_atoms(-(-tokens_kept // recipe.atom), moved=tokens_kept // recipe.atom, seed=recipe.seed)
        view = ShuffledConcatView(**common, atom_order=order)
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
    documents = ranges(first, counts)
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
    traits = frozenset({"padding"})

    @property
    def total_slots(self) -> int:
        if len(self.row_ends):
            return int(self.row_ends[-1]) * self.max_sequence_length
        return int(self.first_atoms[-1]) * self.recipe.atom

    def closings(self, pieces: Pieces) -> Int64[np.ndarray, " P"]:
        return pieces.ends

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
        tokens_read=int(lengths.sum()),
        tokens_kept=int((lengths[~too_short] - 1).sum()) + ends,
        tokens_cut=int((~too_short).sum()) - own_ends,
        tokens_too_short=int(lengths[too_short].sum()),
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
        documents=documents[~too_short],
        first_atoms=first_atoms,
        atom_order=order,
        row_ends=row_ends,
    )
    return replace(view, max_segments_per_sequence=most_segments(view))
