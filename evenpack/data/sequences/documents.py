"""The recipe `documents`: each document is a sequence; one that is too long is split, truncated, dropped or refused."""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Int32, Int64

from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences.view import NO_SEQUENCES, Origins, TokenAccounting, WholeSequencesView, place_of
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

_CHUNK_DOCUMENTS = 1 << 20
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentsView(WholeSequencesView):
    """Sequences ordered by document, then piece. All pieces of a document except the last are full.

    The tokens of pieces are taken from the file unchanged: only the last piece ends in the document's end-of-text.
    """

    recipe: DocumentsRecipe
    documents: Int64[np.ndarray, " kept"]
    """Ids of the kept documents in the token file."""
    first_sequences: Int64[np.ndarray, " kept_plus_1"]
    """The first sequence of each kept document, and the number of sequences."""

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        stop = self.count if stop is None else stop
        lengths = np.full(stop - start, self.max_sequence_length, dtype=np.int32)
        # Only a document's last sequence may be shorter: the one before the next document's first.
        nexts = self.first_sequences[1:]
        first, last = np.searchsorted(nexts, [start + 1, stop + 1]).tolist()
        for begin in range(first, last, _CHUNK_DOCUMENTS):
            end = min(begin + _CHUNK_DOCUMENTS, last)
            _, in_file = self.token_file.spans(self.documents[begin:end])
            before = (np.diff(self.first_sequences[begin : end + 1]) - 1) * self.max_sequence_length
            lengths[nexts[begin:end] - 1 - start] = np.minimum(in_file - before, self.max_sequence_length)
        return lengths

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        documents, skipped = self._pieces(sequence_ids)
        offsets, in_file = self.token_file.spans(documents)
        return offsets + skipped, np.minimum(in_file - skipped, self.max_sequence_length)

    def ends_of_text(
        self, sequence_ids: Int64[np.ndarray, " K"], *, closing: bool
    ) -> Bool[np.ndarray, " tokens"] | None:
        if not closing:
            return None
        is_closed, lengths = self._closed(sequence_ids)
        ends = np.zeros(int(lengths.sum()), dtype=bool)
        ends[np.cumsum(lengths)[is_closed] - 1] = True
        return ends

    def closing_targets(self, sequence_ids: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        is_closed, lengths = self._closed(sequence_ids)
        return (is_closed & (lengths > 1)).astype(np.int64)

    def _closed(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Bool[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns which sequences hold their document's end, and the lengths of all."""
        documents, skipped = self._pieces(sequence_ids)
        left = self.token_file.spans(documents)[1] - skipped
        return left <= self.max_sequence_length, np.minimum(left, self.max_sequence_length)

    @property
    def document_file(self) -> TokenFile:
        return self.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        documents, starts = self._pieces(sequence_ids)
        _, lengths = self.locate(sequence_ids)
        return Origins(documents=documents, starts=starts, tokens=lengths, per_sequence=np.ones_like(starts))

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        place = place_of(document, self.documents)
        if place is None:
            return NO_SEQUENCES
        return np.arange(self.first_sequences[place], self.first_sequences[place + 1])

    def _pieces(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns the document to which each sequence belongs, and the sequence's first token within it."""
        self._check_ids(sequence_ids)
        index = np.searchsorted(self.first_sequences, sequence_ids, side="right") - 1
        return self.documents[index], (sequence_ids - self.first_sequences[index]) * self.max_sequence_length


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledDocumentsView(DocumentsView):
    """Documents of which labels leave some tokens out of the loss; a plan counts targets without reading labels."""

    targets: Int32[np.ndarray, " sequences"]
    """Tokens of each sequence that are predicted: neither left out nor its first."""

    def unpredicted(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"]:
        """Returns what labels leave out. Raises: DataError if a sequence has not the targets that were counted."""
        offsets, lengths = self.locate(sequence_ids)
        left_out = self.token_file.unpredicted(offsets, lengths)
        wrong = np.flatnonzero(_count_targets(left_out, lengths) != self.targets[sequence_ids])
        if len(wrong):
            documents, _ = self._pieces(sequence_ids[wrong[:1]])
            raise DataError(
                f"{self.token_file.prefix}: the labels of document {documents[0]} have changed since its packs were "
                "made, so the targets of a step would be miscounted: give the cache another folder, or remove it"
            )
        return left_out


def _count_targets(left_out: Bool[np.ndarray, " tokens"], lengths: Int64[np.ndarray, " K"]) -> Int32[np.ndarray, " K"]:
    """Returns the tokens of each sequence that are predicted, of which its first is none."""
    firsts = np.cumsum(lengths) - lengths
    predicted = ~left_out
    predicted[firsts] = False
    return np.add.reduceat(predicted, firsts, dtype=np.int32)


def _with_labels(view: DocumentsView) -> LabelledDocumentsView:
    """Counts the targets of each sequence, which reads all labels. Raises: DataError if there are none at all."""
    targets = np.zeros(view.count, dtype=np.int32)
    at_once = max(1, _CHUNK_TOKENS // view.max_sequence_length)
    for start in range(0, view.count, at_once):
        ids = np.arange(start, min(start + at_once, view.count))
        offsets, lengths = view.locate(ids)
        targets[ids] = _count_targets(view.token_file.unpredicted(offsets, lengths), lengths)
    if view.count and not targets.any():
        raise DataError(
            f"{view.token_file.prefix}: the labels leave every token out of the loss (-100), so there is nothing to "
            "learn: give the tokens that are to be predicted as their labels"
        )
    common = {field.name: getattr(view, field.name) for field in fields(DocumentsView)}
    return LabelledDocumentsView(**common, targets=targets)


def build_documents(
    recipe: DocumentsRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
) -> DocumentsView:
    """Builds the view. Raises: DataError naming the first document that is too long where the policy is `error`."""
    _, lengths = token_file.spans(documents)
    too_short = lengths < recipe.minimum_document_length
    too_long = (lengths > recipe.max_sequence_length) & ~too_short
    if recipe.long_documents == "error" and too_long.any():
        raise _too_long(recipe, token_file, documents, lengths, too_long)
    dropped_long = too_long if recipe.long_documents == "drop" else np.zeros_like(too_long)
    kept = ~(too_short | dropped_long)
    kept_lengths = lengths[kept]
    pieces = np.ones_like(kept_lengths)
    if recipe.long_documents == "split":
        pieces = -(-kept_lengths // recipe.max_sequence_length)
    room = pieces * recipe.max_sequence_length
    first_sequences = np.append(0, np.cumsum(pieces))
    accounting = TokenAccounting(
        documents_read=len(documents),
        documents_kept=int(kept.sum()),
        documents_too_short=int(too_short.sum()),
        documents_too_long=int(dropped_long.sum()),
        tokens_read=int(lengths.sum()),
        tokens_kept=int(np.minimum(kept_lengths, room).sum()),
        tokens_cut=int(np.maximum(kept_lengths - room, 0).sum()),
        tokens_too_short=int(lengths[too_short].sum()),
        tokens_too_long=int(lengths[dropped_long].sum()),
        sequences=int(first_sequences[-1]),
    )
    view = DocumentsView(
        recipe=recipe,
        token_file=token_file,
        accounting=accounting,
        max_segments_per_sequence=1,
        directory=None,
        documents=documents[kept],
        first_sequences=first_sequences,
    )
    return _with_labels(view) if token_file.labelled else view


def _too_long(
    recipe: DocumentsRecipe,
    token_file: TokenFile,
    documents: Int64[np.ndarray, " documents"],
    lengths: Int64[np.ndarray, " documents"],
    too_long: Bool[np.ndarray, " documents"],
) -> DataError:
    first = int(np.argmax(too_long))
    return DataError(
        f"document {documents[first]} of {token_file.prefix} has {lengths[first]} tokens, the first of "
        f"{int(too_long.sum())} above recipe.max_sequence_length ({recipe.max_sequence_length}), and "
        "recipe.long_documents is 'error'; take 'split', 'truncate' or 'drop', or a greater length"
    )
