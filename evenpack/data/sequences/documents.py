"""The recipe `documents`: each document is a sequence; one that is too long is split, truncated, dropped or refused."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences.view import (
    LocatedSequences,
    Origins,
    SequenceCounts,
    StoredView,
    TokenAccounting,
    open_stored,
    remove_description,
    write_description,
)
from evenpack.data.tokens.array_file import mapped_array
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

_CHUNK_DOCUMENTS = 1 << 20
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentsView(LocatedSequences, StoredView):
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

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        counts = super().counts(sequence_ids, lengths)
        if self.recipe.end_of_text_in_loss == "all":
            return counts
        return replace(counts, targets=counts.targets - (self._is_closed(sequence_ids) & (counts.targets > 0)))

    def left_out(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"] | None:
        if self.recipe.end_of_text_in_loss == "all":
            return None
        stops = np.cumsum(self.locate(sequence_ids)[1])
        ends = np.zeros(int(stops[-1]), dtype=bool)
        ends[stops[self._is_closed(sequence_ids)] - 1] = True
        return ends

    def _is_closed(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " K"]:
        """Returns which sequences hold their document's end."""
        documents, skipped = self._pieces(sequence_ids)
        return self.token_file.spans(documents)[1] - skipped <= self.max_sequence_length

    @property
    def document_file(self) -> TokenFile:
        return self.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        documents, starts = self._pieces(sequence_ids)
        _, lengths = self.locate(sequence_ids)
        return Origins(documents=documents, starts=starts, tokens=lengths, per_sequence=np.ones_like(starts))

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

    traits = frozenset({"labels"})

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        targets = self.targets[sequence_ids].astype(np.int64)
        return replace(super().counts(sequence_ids, lengths), targets=targets)

    def left_out(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"]:
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


def build_documents(
    recipe: DocumentsRecipe,
    token_file: TokenFile,
    documents: Int64[np.ndarray, " documents"] | None,
    *,
    directory: Path | None = None,
) -> DocumentsView:
    """Builds the view of `documents`, of all if None; with a directory, stores it there and maps it.

    Documents are read in chunks, so that only the arrays of the view grow with them, and stored ones are on disk.

    Raises: DataError naming the first document that is too long where the policy is `error`, or if labels leave out
    every token.
    """
    accounting = _account(recipe, token_file, documents)
    kept = accounting.documents_kept
    if directory is not None:
        remove_description(directory)
    with ExitStack() as files:

        def new_array(name: str, count: int, kind: type[np.integer]) -> np.ndarray:
            if directory is None:
                return np.empty(count, dtype=kind)
            return files.enter_context(mapped_array(directory / f"{name}.npy", count, np.dtype(kind))).view(np.ndarray)

        view = DocumentsView(
            recipe=recipe,
            token_file=token_file,
            accounting=accounting,
            documents=new_array("documents", kept, np.int64),
            first_sequences=new_array("first_sequences", kept + 1, np.int64),
        )
        _divide(view, documents)
        if token_file.labelled:
            common = {field.name: getattr(view, field.name) for field in fields(DocumentsView)}
            view = LabelledDocumentsView(**common, targets=new_array("targets", view.count, np.int32))
            _count_all_targets(view)
    if directory is None:
        return view
    write_description(directory, recipe, token_file, accounting)
    return open_stored(type(view), directory.absolute(), token_file, recipe)


def _account(
    recipe: DocumentsRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"] | None
) -> TokenAccounting:
    """Reads all lengths. Raises: DataError naming the first document that is too long where the policy is `error`."""
    names = ("documents_read", "documents_kept", "tokens_read", "tokens_kept", "sequences")
    totals = Counter(dict.fromkeys(names, 0))
    first_too_long, too_long_documents = (0, 0), 0
    for ids, lengths in _chunks(token_file, documents):
        too_short, too_long, pieces = _divided(recipe, lengths)
        if too_long.any() and not too_long_documents:
            place = int(np.argmax(too_long))
            first_too_long = (int(ids[place]), int(lengths[place]))
        too_long_documents += int(too_long.sum())
        dropped_long = too_long & (pieces == 0)
        is_kept, room = pieces > 0, pieces * recipe.max_sequence_length
        totals.update(
            documents_read=len(ids),
            documents_kept=int(is_kept.sum()),
            documents_too_short=int(too_short.sum()),
            documents_too_long=int(dropped_long.sum()),
            tokens_read=int(lengths.sum()),
            tokens_kept=int(np.minimum(lengths, room).sum()),
            tokens_cut=int(np.maximum(lengths - room, 0).sum(where=is_kept)),
            tokens_too_short=int(lengths[too_short].sum()),
            tokens_too_long=int(lengths[dropped_long].sum()),
            sequences=int(pieces.sum()),
        )
    if recipe.long_documents == "error" and too_long_documents:
        raise DataError(
            f"document {first_too_long[0]} of {token_file.prefix} has {first_too_long[1]} tokens, the first of "
            f"{too_long_documents} above recipe.max_sequence_length ({recipe.max_sequence_length}), and "
            "recipe.long_documents is 'error'; take 'split', 'truncate' or 'drop', or a greater length"
        )
    return TokenAccounting(**totals)


def _divide(view: DocumentsView, documents: Int64[np.ndarray, " documents"] | None) -> None:
    """Fills the arrays of a view."""
    kept = sequences = 0
    view.first_sequences[0] = 0
    for ids, lengths in _chunks(view.token_file, documents):
        _, _, pieces = _divided(view.recipe, lengths)
        is_kept = pieces > 0
        chosen = slice(None) if is_kept.all() else is_kept
        stop = kept + int(is_kept.sum())
        view.documents[kept:stop] = ids[chosen]
        view.first_sequences[kept + 1 : stop + 1] = sequences + np.cumsum(pieces[chosen])
        kept, sequences = stop, sequences + int(pieces.sum())
        view.release_pages()


def _chunks(
    token_file: TokenFile, documents: Int64[np.ndarray, " documents"] | None
) -> Iterator[tuple[Int64[np.ndarray, " chunk"], Int64[np.ndarray, " chunk"]]]:
    """Yields ids and lengths of all of `documents`, some at a time."""
    count = token_file.documents if documents is None else len(documents)
    for start in range(0, count, _CHUNK_DOCUMENTS):
        stop = min(start + _CHUNK_DOCUMENTS, count)
        ids = np.arange(start, stop) if documents is None else documents[start:stop]
        yield ids, token_file.spans(ids)[1]
        token_file.release_pages()


def _divided(
    recipe: DocumentsRecipe, lengths: Int64[np.ndarray, " chunk"]
) -> tuple[Bool[np.ndarray, " chunk"], Bool[np.ndarray, " chunk"], Int64[np.ndarray, " chunk"]]:
    """Returns which documents are too short, which are too long, and the sequences of each, 0 if it is dropped."""
    too_short = lengths < recipe.minimum_document_length
    too_long = (lengths > recipe.max_sequence_length) & ~too_short
    pieces = np.ones_like(lengths)
    if recipe.long_documents == "split":
        pieces[too_long] = -(-lengths[too_long] // recipe.max_sequence_length)
    if recipe.long_documents == "drop":
        pieces[too_long] = 0
    pieces[too_short] = 0
    return too_short, too_long, pieces


def _count_all_targets(view: LabelledDocumentsView) -> None:
    """Counts the targets of each sequence, which reads all labels. Raises: DataError if there are none at all."""
    are_any = False
    at_once = max(1, _CHUNK_TOKENS // view.max_sequence_length)
    for start in range(0, view.count, at_once):
        stop = min(start + at_once, view.count)
        offsets, lengths = view.locate(np.arange(start, stop))
        targets = _count_targets(view.token_file.unpredicted(offsets, lengths), lengths)
        view.targets[start:stop] = targets
        are_any |= bool(targets.any())
        view.release_pages()
    if view.count and not are_any:
        raise DataError(
            f"{view.token_file.prefix}: the labels leave every token out of the loss (-100), so there is nothing to "
            "learn: give the tokens that are to be predicted as their labels"
        )
