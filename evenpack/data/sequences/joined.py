"""The sequences of a source in several forms, numbered one form behind another."""

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from evenpack.data.sequences.view import Origins, SequenceContent, SequenceCounts, SequenceOrigins, SequenceView
from evenpack.data.tokens.file import TokenFile


class JoinedOrigins:
    """The origins of the sequences of two forms of the same documents; the later ones are numbered from `first` on."""

    def __init__(
        self, before: SequenceOrigins | SequenceView, after: SequenceOrigins | SequenceView, *, first: int
    ) -> None:
        self._parts = (before, after)
        self._first = first

    def _origins(self, form: int) -> SequenceOrigins:
        part = self._parts[form]
        assert isinstance(part, SequenceOrigins), "views of pairs have theirs beside them"
        return part

    @property
    def document_file(self) -> TokenFile:
        return self._origins(1).document_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        forms, split = _by_form(sequence_ids, self._first)
        return Origins.joined(forms, {form: self._origins(form).origins(ids) for form, (ids, _) in split.items()})


class JoinedView(JoinedOrigins):
    """The sequences of two forms of the same documents: those of `after` are numbered behind those of `before`."""

    def __init__(self, before: SequenceView, after: SequenceView) -> None:
        super().__init__(before, after, first=before.count)
        self.before = before
        self.after = after
        self.traits = before.traits | after.traits
        self.max_sequence_length = after.max_sequence_length
        """That of the later form, which is no shorter where sequences of the earlier one go on."""
        self.count = before.count + after.count
        self.max_segments_per_sequence = max(before.max_segments_per_sequence, after.max_segments_per_sequence)
        self.accounting = after.accounting
        self._views = (before, after)

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        stop, first = self.count if stop is None else stop, self._first
        before = self.before.lengths(min(start, first), min(stop, first))
        return np.concatenate([before, self.after.lengths(max(start - first, 0), max(stop - first, 0))])

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        forms, split = _by_form(sequence_ids, self._first)
        parts = {form: self._views[form].counts(ids, lengths[members]) for form, (ids, members) in split.items()}
        return SequenceCounts.joined(forms, parts)

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        forms, split = _by_form(sequence_ids, self._first)
        return SequenceContent.joined(forms, {form: self._views[form].read(ids) for form, (ids, _) in split.items()})


def single_views(view: SequenceView) -> list[SequenceView]:
    """Returns the views of all forms, each of which is stored by itself."""
    return [*single_views(view.before), view.after] if isinstance(view, JoinedView) else [view]


def _by_form(
    sequence_ids: Int64[np.ndarray, " K"], first: int
) -> tuple[Int64[np.ndarray, " K"], dict[int, tuple[Int64[np.ndarray, " own"], Bool[np.ndarray, " K"]]]]:
    """Returns the form of each sequence; and of each form that has any, their own ids and which they are."""
    forms = (sequence_ids >= first).astype(np.int64)
    members = {form: forms == form for form in np.unique(forms).tolist() or [1]}
    return forms, {form: (sequence_ids[of_form] - form * first, of_form) for form, of_form in members.items()}
