"""The recipes `sentence_pairs` and `masked_pairs`: [CLS] A [SEP] B [SEP], in a token file stored with the view.

Pairs that were made here know their documents, by two columns that training never reads and that are in no fingerprint:

    first_starts.npy      int64[N]       start of A in the token file of the documents, without special tokens
    second_starts.npy     int64[N]       start of B

Masks that were drawn once are stored with the pairs, each pair with a count of its own. The pair itself is stored as
the model sees it: at each such position [MASK], a random token, or the one to predict.

    mask_offsets.npy      int64[N + 1]   start of each sequence's masks in the next two, and the number of masks
    mask_positions.npy    uint16[M]      ascending positions within the sequence
    mask_labels.npy       int32[M]       the tokens to predict
    most_masks.npy        uint16[L + 1]  the greatest count of a sequence of each length

N = sequences, M = masked tokens, L = the greatest length, K = sequences asked for, T = their masked tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, UInt8, UInt16

from evenpack.data.ranges import ranges
from evenpack.data.recipes import MaskedPairsRecipe, SentencePairsRecipe
from evenpack.data.sequences.view import Origins, SequenceContent, SequenceCounts, SequencesAsDocuments, StoredView
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import column_path
from evenpack.errors import DataError

MASK_COLUMNS = {"mask_offsets": "<i8", "mask_positions": "<u2", "mask_labels": "<i4"}
"""Columns written with the sequences, by name and numpy's type."""
MOST_MASKS = "most_masks"
"""Name of the column that is computed from the others."""
PAIRS = "pairs"
"""Name of the token file's pair of files, in the folder of a split."""
ORIGIN_COLUMNS = {"first_starts": "<i8", "second_starts": "<i8"}
"""Start of A and B in the token file of the documents, without special tokens; by name and numpy's type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairMasks:
    """The masks of K sequences, one sequence after another."""

    counts: Int64[np.ndarray, " K"]
    places: Integer[np.ndarray, " T"]
    """Ascending positions within each sequence."""
    labels: Integer[np.ndarray, " T"]
    """The tokens to predict."""

    def columns(self, masks_before: int) -> dict[str, Integer[np.ndarray, " _"]]:
        """Returns the rows to append to the columns of stored masks that hold so many masks."""
        return {
            "mask_offsets": masks_before + np.cumsum(self.counts),
            "mask_positions": self.places.astype(np.uint16),
            "mask_labels": self.labels.astype(np.int32),
        }

    def select(self, chosen: Bool[np.ndarray, " K"]) -> "PairMasks":
        """Returns the masks of the chosen sequences."""
        masks = np.repeat(chosen, self.counts)
        return PairMasks(counts=self.counts[chosen], places=self.places[masks], labels=self.labels[masks])


def most_masks_by_length(
    mask_offsets: Int64[np.ndarray, " N_plus_1"], lengths: Iterable[Integer[np.ndarray, " chunk"]], *, longest: int
) -> UInt16[np.ndarray, " L_plus_1"]:
    """Returns `most_masks` of sequences whose lengths come some at a time; 0 where no sequence has the length."""
    most = np.zeros(longest + 1, dtype=np.uint16)
    first = 0
    for chunk in lengths:
        counts = np.diff(mask_offsets[first : first + len(chunk) + 1])
        np.maximum.at(most, chunk, counts.astype(np.uint16))
        first += len(chunk)
    return most


@dataclass(frozen=True, kw_only=True, eq=False)
class SentencePairsView(SequencesAsDocuments, StoredView):
    """Pairs that are the documents of `token_file`. The two arrays are columns stored by the writer of that file."""

    recipe: SentencePairsRecipe | MaskedPairsRecipe
    first_segment_lengths: UInt16[np.ndarray, " sequences"]
    """Tokens of [CLS] A [SEP]; the others, B [SEP], are of the other token type."""
    next_sentence_labels: UInt8[np.ndarray, " sequences"]
    """Label: 0 where B follows A in its document, 1 where it is from another document."""
    traits = frozenset({"pairs"})

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        return replace(
            super().read(sequence_ids),
            first_lengths=self.first_segment_lengths[sequence_ids].astype(np.int64),
            labels=self.next_sentence_labels[sequence_ids].astype(np.int64),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedPairsView(SentencePairsView):
    """Pairs whose tokens are masked already (`static_masks`, `masked_pairs`), with their masks, which may be mapped.

    Raises: DataError if the arrays do not fit one another or the pairs.
    """

    mask_offsets: Int64[np.ndarray, " sequences_plus_1"]
    mask_positions: UInt16[np.ndarray, " masks"]
    mask_labels: Int32[np.ndarray, " labels"]
    most_masks: UInt16[np.ndarray, " lengths"]
    traits = frozenset({"masks", "pairs"})

    def __post_init__(self) -> None:
        found = (len(self.mask_offsets) - 1, len(self.most_masks) - 1)
        if found != (self.count, self.max_sequence_length):
            raise DataError(
                f"the stored masks in {self.directory or self.token_file.prefix} do not fit the pairs: mask_offsets "
                f"and most_masks are of {found[0]} sequences of up to {found[1]} tokens, expected {self.count} of up "
                f"to {self.max_sequence_length}; prepare again"
            )
        ends = self.mask_offsets[[0, -1]].tolist()
        if ends != [0, len(self.mask_positions)] or len(self.mask_labels) != len(self.mask_positions):
            raise DataError(
                f"stored masks do not fit together: {len(self.mask_positions)} positions, {len(self.mask_labels)} "
                f"labels, offsets from {ends[0]} to {ends[1]}; prepare again"
            )

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        """Counts stored masks; reads neither positions nor labels.

        Raises: DataError for a count that no sequence of that length has.
        """
        counts: Int64[np.ndarray, " K"] = self.mask_offsets[sequence_ids + 1] - self.mask_offsets[sequence_ids]
        most = self.most_masks[lengths]
        wrong = np.flatnonzero((counts < 0) | (counts > most))
        if len(wrong):
            raise DataError(
                f"mask_offsets gives sequence {sequence_ids[wrong[0]]} of {lengths[wrong[0]]} tokens "
                f"{counts[wrong[0]]} masks, and most_masks allows 0 to {most[wrong[0]]}: the stored masks are damaged "
                "or of other sequences; prepare again"
            )
        return replace(super().counts(sequence_ids, lengths), targets=counts)

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        """Returns the content with its masks. Raises: DataError if one is beyond its sequence, or as `counts` does."""
        content = super().read(sequence_ids)
        counts = content.counts.targets
        chosen = ranges(self.mask_offsets[sequence_ids], counts)
        places = self.mask_positions[chosen].astype(np.int64)
        outside = np.flatnonzero(places >= np.repeat(content.lengths, counts))
        if len(outside):
            sequence = int(np.repeat(sequence_ids, counts)[outside[0]])
            raise DataError(
                f"mask_positions has a mask at position {places[outside[0]]} of sequence {sequence}, beyond its "
                "end: the stored masks are damaged or of other sequences; prepare again"
            )
        return replace(content, mask_places=places, mask_labels=self.mask_labels[chosen].astype(np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class PairOrigins:
    """The origins of pairs that were made here of the documents of `document_file`."""

    view: SentencePairsView
    document_file: TokenFile
    first_starts: Int64[np.ndarray, " sequences"]
    second_starts: Int64[np.ndarray, " sequences"]

    @classmethod
    def open(cls, view: SentencePairsView, document_file: TokenFile) -> "PairOrigins":
        """Opens the columns. Raises: DataError if one is missing or broken."""
        columns = {}
        for name in ORIGIN_COLUMNS:
            path = column_path(view.token_file.prefix, name)
            columns[name] = open_array(path)
            if len(columns[name]) != view.count:
                raise DataError(f"{path} is of {len(columns[name])} pairs, there are {view.count}; prepare again")
        return cls(view=view, document_file=document_file, **columns)

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
