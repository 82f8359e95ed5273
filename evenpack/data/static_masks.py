"""Masks that were drawn once and stored with the sequences, each sequence with a count of its own.

    mask_offsets.npy      int64[N + 1]   where in the other two each sequence's masks begin, and their number
    mask_positions.npy    uint16[M]      rising places within the sequence
    mask_labels.npy       int32[M]       the tokens to guess; the sequence itself holds [MASK], or what stands there

N = sequences, M = masked tokens, K = sequences asked for.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt16

from evenpack.data.masking import MaskedTokens
from evenpack.errors import DataError
from evenpack.files import atomic_open

_NAMES = ("mask_offsets", "mask_positions", "mask_labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticMasks:
    """The stored masks of a split, which may be memory-mapped."""

    mask_offsets: Int64[np.ndarray, " N_plus_1"]
    mask_positions: UInt16[np.ndarray, " _"]
    mask_labels: Int32[np.ndarray, " _"]

    def __post_init__(self) -> None:
        found = {len(self.mask_positions), len(self.mask_labels), int(self.mask_offsets[-1])}
        if len(found) != 1 or self.mask_offsets[0] != 0:
            raise DataError(
                f"stored masks do not fit together: {len(self.mask_positions)} positions, {len(self.mask_labels)} "
                f"labels, offsets from {self.mask_offsets[0]} to {self.mask_offsets[-1]}; store them again"
            )

    @classmethod
    def open(cls, directory: Path) -> "StaticMasks":
        """Maps the three files. Raises: DataError if one is missing or they do not fit together."""
        try:
            arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in _NAMES}
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{directory} holds no stored masks ({error}); store them again") from error
        return cls(**arrays)

    def save(self, directory: Path) -> None:
        """Writes the three files, each atomically, the offsets last."""
        for name in reversed(_NAMES):
            with atomic_open(directory / f"{name}.npy") as file:
                np.save(file, getattr(self, name))

    def counts(self, sequence_ids: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Masked tokens of each sequence; reads neither positions nor labels."""
        counts: Int64[np.ndarray, " K"] = self.mask_offsets[sequence_ids + 1] - self.mask_offsets[sequence_ids]
        return counts

    def take(
        self,
        sequence_ids: Int64[np.ndarray, " K"],
        tokens: Integer[np.ndarray, " T"],
        offsets: Int64[np.ndarray, " K_plus_1"],
    ) -> MaskedTokens:
        """The masks of some sequences that lie behind one another in `tokens`; `offsets` are their bounds.

        Raises: DataError if a mask lies behind the end of its sequence.
        """
        counts = self.counts(sequence_ids)
        before = np.cumsum(counts) - counts
        chosen = np.arange(counts.sum()) + np.repeat(self.mask_offsets[sequence_ids] - before, counts)
        places = self.mask_positions[chosen].astype(np.int64)
        outside = np.flatnonzero(places >= np.repeat(np.diff(offsets), counts))
        if len(outside):
            sequence = int(np.repeat(sequence_ids, counts)[outside[0]])
            raise DataError(
                f"the stored mask at place {places[outside[0]]} of sequence {sequence} lies behind its end: the masks "
                "are of other sequences; store them again"
            )
        return MaskedTokens(
            tokens=tokens,
            positions=places + np.repeat(offsets[:-1], counts),
            labels=self.mask_labels[chosen].astype(tokens.dtype),
            counts=counts,
        )
