"""The documents of each pair of sentences: two columns stored with the pairs, which training never reads.

They are in no fingerprint, as they decide no step: sets that were prepared without them remain valid.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.sequences.origins import Origins
from evenpack.data.sequences.sentence_pairs import SentencePairsView
from evenpack.data.tokens.file import TokenFile, column_path
from evenpack.errors import DataError

ORIGIN_COLUMNS = {"first_starts": "<i8", "second_starts": "<i8"}
"""Start of A and B in the token file of the documents, without special tokens; by name and numpy's type."""

_SCANNED = 1 << 20
"""Pairs scanned together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairOrigins:
    """The origins of pairs that were made here of the documents of `document_file`."""

    view: SentencePairsView
    document_file: TokenFile
    first_starts: Int64[np.ndarray, " sequences"]
    second_starts: Int64[np.ndarray, " sequences"]

    @classmethod
    def open(cls, view: SentencePairsView, document_file: TokenFile) -> "PairOrigins | None":
        """Opens the columns; None if the pairs were prepared without them. Raises: DataError if one is broken."""
        paths = [column_path(view.token_file.prefix, name) for name in ORIGIN_COLUMNS]
        if not all(path.is_file() for path in paths):
            return None
        first, second = (_mapped(path, view.count) for path in paths)
        return cls(view=view, document_file=document_file, first_starts=first, second_starts=second)

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        offsets, lengths = self.view.locate(sequence_ids)
        first = self.view.first_segment_lengths[sequence_ids].astype(np.int64) - 2
        begins = np.stack([self.first_starts[sequence_ids], self.second_starts[sequence_ids]], axis=1).ravel()
        documents = self._holders(begins)
        return Origins(
            documents=documents,
            starts=begins - self.document_file.spans(documents)[0],
            tokens=np.stack([first, lengths - first - 3], axis=1).ravel(),
            per_sequence=np.full_like(offsets, 2),
        )

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        """Returns the sequences of a document, as `SequenceOrigins` does; reads both columns, 16 bytes per pair."""
        (begin,), (length,) = self.document_file.spans(np.array([document]))
        found = []
        for start in range(0, self.view.count, _SCANNED):
            chunk = slice(start, start + _SCANNED)
            first, second = self.first_starts[chunk], self.second_starts[chunk]
            is_part = (first >= begin) & (first < begin + length) | (second >= begin) & (second < begin + length)
            found.append(np.flatnonzero(is_part) + start)
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def _holders(self, places: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the document of each token of the file, by one bisection of the mapped index for all tokens."""
        documents = self.document_file.documents
        low, high = np.zeros_like(places), np.full_like(places, documents - 1)
        for _ in range(documents.bit_length()):
            middle = (low + high + 1) // 2
            begins_before = self.document_file.spans(middle)[0] <= places
            low, high = np.where(begins_before, middle, low), np.where(begins_before, high, middle - 1)
        return low


@dataclass(frozen=True, kw_only=True, eq=False)
class PairsAsDocuments:
    """The origins of imported pairs: their documents are unknown, so each row is its own document."""

    view: SentencePairsView

    @property
    def document_file(self) -> TokenFile:
        return self.view.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        _, lengths = self.view.locate(sequence_ids)
        ones = np.ones_like(lengths)
        return Origins(documents=sequence_ids, starts=np.zeros_like(lengths), tokens=lengths, per_sequence=ones)

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        return np.arange(document, min(document + 1, self.view.count))


@dataclass(frozen=True, kw_only=True, eq=False)
class UnknownOrigins:
    """The origins of pairs that were prepared before their documents were recorded."""

    view: SentencePairsView
    document_file: TokenFile

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        nothing = np.zeros(0, dtype=np.int64)
        return Origins(
            documents=nothing, starts=nothing, tokens=nothing, per_sequence=np.zeros(len(sequence_ids), dtype=np.int64)
        )

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        """Raises DataError, because the documents are unknown."""
        raise DataError(
            f"{self.view.token_file.prefix.parent} holds pairs whose documents were not recorded at preparation: "
            "prepare the same data section into another data.prepared_dir (the pairs, their order and the fingerprint "
            "will be the same) and ask there"
        )


def _mapped(path: Path, count: int) -> np.ndarray:
    try:
        column: np.ndarray = np.load(path, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not whole ({error}); prepare again") from error
    if len(column) != count:
        raise DataError(f"{path} is of {len(column)} pairs, there are {count}; prepare again")
    return column
