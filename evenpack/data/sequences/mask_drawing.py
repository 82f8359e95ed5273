"""Masks drawn once, while sentence pairs are made: fixed for each duplicate, as in BERT's own data.

A pair's masks depend on (seed, pass, source, position of its first token in the token file) alone, and neither on the
blocks in which pairs are made nor on threads.

Shapes: K = pairs, T = their tokens, M = masked tokens.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt16

from evenpack.data.config import MaskingConfig
from evenpack.data.sequences.masking import MaskingVocabulary, mask_sequences, masking_keys


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnMasks:
    """The masked form of a unit of pairs."""

    tokens: Integer[np.ndarray, " T"]
    """Tokens as the model sees them."""
    counts: Int64[np.ndarray, " K"]
    places: UInt16[np.ndarray, " M"]
    """Positions of the masks within the pair."""
    labels: Int32[np.ndarray, " M"]

    def columns(self, masks_before: int) -> dict[str, Integer[np.ndarray, " _"]]:
        """Returns the rows to append to the columns of stored masks (`static_masks.py`) that hold so many masks."""
        return {
            "mask_offsets": masks_before + np.cumsum(self.counts),
            "mask_positions": self.places,
            "mask_labels": self.labels,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskDrawing:
    """Draws the masks of one source's pairs."""

    config: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int
    source_key: int
    """A key that identifies the source."""

    def draw(
        self,
        tokens: Integer[np.ndarray, " T"],
        lengths: Int64[np.ndarray, " K"],
        first_starts: Int64[np.ndarray, " K"],
        pass_number: int,
    ) -> DrawnMasks:
        """Masks pairs whose tokens are concatenated; `first_starts` are the file positions of their A."""
        offsets = np.append(0, np.cumsum(lengths))
        source_keys = np.full(len(lengths), self.source_key, dtype=np.uint64)
        keys = masking_keys(self.seed, np.full(len(lengths), pass_number), source_keys, first_starts)
        masked = mask_sequences(tokens, offsets, keys, self.config, self.vocabulary)
        places = masked.positions - np.repeat(offsets[:-1], masked.counts)
        return DrawnMasks(
            tokens=masked.tokens,
            counts=masked.counts,
            places=places.astype(np.uint16),
            labels=masked.labels.astype(np.int32),
        )
