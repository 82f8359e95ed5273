"""`concat`: the split's documents one behind another in a stream that is cut exactly at `max_sequence_length`."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Integer

from evenpack.data.config import ConcatRecipe
from evenpack.data.sequences.accounting import TokenAccounting
from evenpack.data.sequences.view import StoredView
from evenpack.data.tokens.file import TokenFile


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pieces:
    """What the cuts asked for are made of: P pieces of documents, cut by cut."""

    documents: Int64[np.ndarray, " P"]
    """Index among the kept documents."""
    starts: Int64[np.ndarray, " P"]
    """First token within the document."""
    lengths: Int64[np.ndarray, " P"]
    per_cut: Int64[np.ndarray, " K"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcatView(StoredView):
    """Sequences are cuts of the stream; only the last one may be shorter than `max_sequence_length`.

    A cut covers pieces of one or more documents. These need not be neighbours in the token file: documents of other
    splits, and dropped ones, lie between. Isolated, each piece is a segment; otherwise the cut is one.
    """

    recipe: ConcatRecipe
    documents: Int64[np.ndarray, " kept"]
    """Ids of the kept documents in the token file, in the stream's order."""
    stream_starts: Int64[np.ndarray, " kept_plus_1"]
    """Where in the stream each kept document begins, and the stream's length."""
    first_documents: Int64[np.ndarray, " cuts_plus_1"]
    """Which kept document holds a cut's first token, and the number of kept documents."""

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        stop = self.count if stop is None else stop
        lengths = np.full(stop - start, self.max_sequence_length, dtype=np.int32)
        if start < stop == self.count:
            lengths[-1] = self.stream_starts[-1] - (self.count - 1) * self.max_sequence_length
        return lengths

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        begins, ends = self._bounds(sequence_ids)
        index = self.first_documents[sequence_ids]
        offsets, _ = self.token_file.spans(self.documents[index])
        return offsets + begins - self.stream_starts[index], ends - begins

    def segments(
        self, sequence_ids: Int64[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " segments"], Int64[np.ndarray, " K"]]:
        if self.recipe.isolate_documents:
            pieces = self._pieces(sequence_ids)
            return pieces.lengths, pieces.per_cut
        begins, ends = self._bounds(sequence_ids)
        return ends - begins, np.ones_like(sequence_ids)

    def gather(self, sequence_ids: Int64[np.ndarray, " K"]) -> Integer[np.ndarray, " tokens"]:
        pieces = self._pieces(sequence_ids)
        offsets, _ = self.token_file.spans(self.documents[pieces.documents])
        return self.token_file.gather(*_join_neighbours(offsets + pieces.starts, pieces.lengths))

    def statistics(
        self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        lengths = lengths.astype(np.int64)
        if not self.recipe.isolate_documents:
            self._check_ids(sequence_ids)
            return np.ones_like(lengths), lengths**2
        pieces = self._pieces(sequence_ids)
        firsts = np.cumsum(pieces.per_cut) - pieces.per_cut
        return pieces.per_cut, np.add.reduceat(pieces.lengths**2, firsts)

    def _bounds(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Where in the stream each cut begins and ends."""
        self._check_ids(sequence_ids)
        begins = sequence_ids * self.max_sequence_length
        return begins, np.minimum(begins + self.max_sequence_length, self.stream_starts[-1])

    def _pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> _Pieces:
        begins, ends = self._bounds(sequence_ids)
        per_cut = _count_pieces(self.stream_starts, self.first_documents, sequence_ids, ends)
        before = np.cumsum(per_cut) - per_cut
        documents = np.arange(per_cut.sum()) + np.repeat(self.first_documents[sequence_ids] - before, per_cut)
        origins = self.stream_starts[documents]
        starts = np.maximum(origins, np.repeat(begins, per_cut))
        stops = np.minimum(self.stream_starts[documents + 1], np.repeat(ends, per_cut))
        return _Pieces(documents=documents, starts=starts - origins, lengths=stops - starts, per_cut=per_cut)


def build_concat(recipe: ConcatRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]) -> ConcatView:
    _, lengths = token_file.spans(documents)
    too_short = lengths < recipe.minimum_document_length
    stream_starts = np.append(0, np.cumsum(lengths[~too_short]))
    tokens_kept = int(stream_starts[-1])
    begins = np.arange(0, tokens_kept, recipe.max_sequence_length)
    holders = np.searchsorted(stream_starts, begins, side="right") - 1
    first_documents = np.append(holders, len(stream_starts) - 1)
    longest = 1
    if recipe.isolate_documents and len(begins):
        ends = np.append(begins[1:], tokens_kept)
        longest = int(_count_pieces(stream_starts, first_documents, np.arange(len(begins)), ends).max())
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
    return ConcatView(
        recipe=recipe,
        token_file=token_file,
        accounting=accounting,
        max_segments_per_sequence=longest,
        directory=None,
        documents=documents[~too_short],
        stream_starts=stream_starts,
        first_documents=first_documents,
    )


def _count_pieces(
    stream_starts: Int64[np.ndarray, " kept_plus_1"],
    first_documents: Int64[np.ndarray, " cuts_plus_1"],
    cuts: Int64[np.ndarray, " K"],
    ends: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " K"]:
    """Documents in each cut: the next cut's first one belongs to this cut too, unless it begins where this one ends."""
    following = first_documents[cuts + 1]
    counts: Int64[np.ndarray, " K"] = following - first_documents[cuts] + (stream_starts[following] < ends)
    return counts


def _join_neighbours(
    offsets: Int64[np.ndarray, " P"], lengths: Int64[np.ndarray, " P"]
) -> tuple[Int64[np.ndarray, " slices"], Int64[np.ndarray, " slices"]]:
    """One slice where pieces follow one another in the file, as most do: many short documents are one copy."""
    if len(offsets) == 0:
        return offsets, lengths
    (firsts,) = np.nonzero(np.append(True, offsets[1:] != offsets[:-1] + lengths[:-1]))
    return offsets[firsts], np.add.reduceat(lengths, firsts)
