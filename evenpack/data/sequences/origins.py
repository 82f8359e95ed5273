"""Origins of sequences: which parts of which documents are in which sequence.

Views of documents answer by arithmetic and bisection, in time that does not grow with the corpus. Pairs of sentences
answer by two stored columns (`pair_origins.py`).

Shapes: K = sequences asked for, P = parts of documents in them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from evenpack.data.tokens.file import TokenFile


@dataclass(frozen=True, kw_only=True, eq=False)
class Origins:
    """The parts of documents in K sequences, sequence by sequence, in the order of their tokens."""

    documents: Int64[np.ndarray, " P"]
    """Ids in the source's token file, from 0 in the order in which `prepare` read them."""
    starts: Int64[np.ndarray, " P"]
    """First token within the document."""
    tokens: Int64[np.ndarray, " P"]
    """Number of the document's tokens that follow from there; 0 where only an end-of-text represents it."""
    per_sequence: Int64[np.ndarray, " K"]

    def of_document(self, document: int) -> "Origins":
        """Returns the parts of this document alone."""
        chosen = self.documents == document
        sequences = np.repeat(np.arange(len(self.per_sequence)), self.per_sequence)[chosen]
        return Origins(
            documents=self.documents[chosen],
            starts=self.starts[chosen],
            tokens=self.tokens[chosen],
            per_sequence=np.bincount(sequences, minlength=len(self.per_sequence)),
        )


@runtime_checkable
class SequenceOrigins(Protocol):
    """The origins of the sequences of one split of one source."""

    @property
    def document_file(self) -> TokenFile:
        """The token file of the documents, which are numbered by their order in it."""

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        """Returns the origins of these sequences; a sequence of unknown origin has none."""

    def sequences_of(self, document: int) -> Int64[np.ndarray, " sequences"]:
        """Returns the sequences that hold a part of the document, ascending; none if it is in another split or dropped.

        Raises: DataError if that is not known.
        """


def holding(
    candidates: Int64[np.ndarray, " K"], origins: Callable[[Int64[np.ndarray, " K"]], Origins], document: int
) -> Int64[np.ndarray, " sequences"]:
    """Returns those of the candidates that hold a part of the document, ascending."""
    ascending = np.unique(candidates)
    found: Int64[np.ndarray, " sequences"] = ascending[origins(ascending).of_document(document).per_sequence > 0]
    return found


def place_of(document: int, documents: Int64[np.ndarray, " kept"]) -> int | None:
    """Returns the index of a document among the kept ones, ascending and perhaps mapped; None if it is not kept."""
    place = int(np.searchsorted(documents, document))
    return place if place < len(documents) and documents[place] == document else None


NO_SEQUENCES = np.zeros(0, dtype=np.int64)
