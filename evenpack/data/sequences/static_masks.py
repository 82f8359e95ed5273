"""Masks that were drawn once and are stored with the sequences, each sequence with a count of its own.

    mask_offsets.npy      int64[N + 1]   start of each sequence's masks in the next two, and the number of masks
    mask_positions.npy    uint16[M]      ascending positions within the sequence
    mask_labels.npy       int32[M]       the tokens to predict
    most_masks.npy        uint16[L + 1]  the greatest count of a sequence of each length

The sequence itself is stored as the model sees it: at each such position [MASK], a random token, or the one to predict.

N = sequences, M = masked tokens, L = the greatest length, K = sequences asked for, T = their masked tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt16

from evenpack.errors import DataError

MASK_COLUMNS = {"mask_offsets": "<i8", "mask_positions": "<u2", "mask_labels": "<i4"}
"""Columns written with the sequences, by name and numpy's type."""
MOST_MASKS = "most_masks"
"""Name of the column that is computed from the others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TakenMasks:
    """The masks of K sequences, one sequence after another."""

    counts: Int64[np.ndarray, " K"]
    places: Int64[np.ndarray, " T"]
    """Positions within the sequence."""
    labels: Int64[np.ndarray, " T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticMasks:
    """The stored masks of a split, which may be memory-mapped."""

    mask_offsets: Int64[np.ndarray, " N_plus_1"]
    mask_positions: UInt16[np.ndarray, " M"]
    mask_labels: Int32[np.ndarray, " labels"]
    most_masks: UInt16[np.ndarray, " L_plus_1"]

    def __post_init__(self) -> None:
        ends = self.mask_offsets[[0, -1]].tolist() if len(self.mask_offsets) else [0, -1]
        if ends != [0, len(self.mask_positions)] or len(self.mask_labels) != len(self.mask_positions):
            raise DataError(
                f"stored masks do not fit together: {len(self.mask_positions)} positions, {len(self.mask_labels)} "
                f"labels, offsets from {ends[0]} to {ends[1]}; prepare again"
            )

    def counts(
        self, sequence_ids: Int64[np.ndarray, " K"], lengths: Int64[np.ndarray, " K"]
    ) -> Int64[np.ndarray, " K"]:
        """Returns the masked tokens of each sequence; reads neither positions nor labels.

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
        return counts

    def take(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Int64[np.ndarray, " K"]) -> TakenMasks:
        """Returns the masks of sequences that have these lengths.

        Raises: DataError if a mask is beyond the end of its sequence, or as `counts` does.
        """
        counts = self.counts(sequence_ids, lengths)
        before = np.cumsum(counts) - counts
        chosen = np.arange(counts.sum()) + np.repeat(self.mask_offsets[sequence_ids] - before, counts)
        places = self.mask_positions[chosen].astype(np.int64)
        outside = np.flatnonzero(places >= np.repeat(lengths, counts))
        if len(outside):
            sequence = int(np.repeat(sequence_ids, counts)[outside[0]])
            raise DataError(
                f"mask_positions has a mask at position {places[outside[0]]} of sequence {sequence}, beyond its "
                "end: the stored masks are damaged or of other sequences; prepare again"
            )
        return TakenMasks(counts=counts, places=places, labels=self.mask_labels[chosen].astype(np.int64))


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
