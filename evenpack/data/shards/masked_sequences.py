"""Finished pairs with their masks, as shards hold them and as `prepare` stores them.

Shapes: K = sequences, T = their tokens, M = masked tokens.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.sequences import MaskedPairsView


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedSequences:
    """K sequences, concatenated; with the columns of `MaskedPairsView`."""

    tokens: Integer[np.ndarray, " T"]
    """Tokens as the model sees them: [MASK], a random token or the original one at each masked position."""
    lengths: Int64[np.ndarray, " K"]
    first_segment_lengths: Int64[np.ndarray, " K"]
    """Tokens of [CLS] A [SEP]; the others are of the other token type."""
    next_sentence_labels: Int64[np.ndarray, " K"]
    mask_counts: Int64[np.ndarray, " K"]
    mask_places: Int64[np.ndarray, " M"]
    """Ascending positions within each sequence."""
    mask_labels: Int64[np.ndarray, " M"]
    """The tokens to predict."""

    @classmethod
    def of_view(cls, view: MaskedPairsView, first: int, last: int) -> "MaskedSequences":
        """Returns the sequences `first` to `last` of a prepared split."""
        ids = np.arange(first, last)
        lengths = view.lengths(first, last).astype(np.int64)
        masks = view.masks.take(ids, lengths)
        return cls(
            tokens=view.gather(ids),
            lengths=lengths,
            first_segment_lengths=view.first_segment_lengths[first:last].astype(np.int64),
            next_sentence_labels=view.next_sentence_labels[first:last].astype(np.int64),
            mask_counts=masks.counts,
            mask_places=masks.places,
            mask_labels=masks.labels,
        )

    @property
    def ends(self) -> Int64[np.ndarray, " K"]:
        """Returns the end of each sequence, one past its last token."""
        return np.cumsum(self.lengths)

    def restored_tokens(self) -> Integer[np.ndarray, " T"]:
        """Returns the tokens before masking."""
        tokens = self.tokens.copy()
        tokens[np.repeat(self.ends - self.lengths, self.mask_counts) + self.mask_places] = self.mask_labels
        return tokens

    def identities(self) -> UInt64[np.ndarray, " K"]:
        """Returns XXH3 (64 bits) of each sequence before masking, for any type of tokens; duplicates share it."""
        content = np.ascontiguousarray(self.restored_tokens(), dtype="<u4").view(np.uint8).data
        bounds = [0, *(4 * self.ends).tolist()]
        hashes = (xxhash.xxh3_64_intdigest(content[start:stop]) for start, stop in pairwise(bounds))
        return np.fromiter(hashes, dtype=np.uint64, count=len(self.lengths))

    def select(self, chosen: Bool[np.ndarray, " K"]) -> "MaskedSequences":
        """Returns the chosen sequences, in their order."""
        masks = np.repeat(chosen, self.mask_counts)
        return MaskedSequences(
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            first_segment_lengths=self.first_segment_lengths[chosen],
            next_sentence_labels=self.next_sentence_labels[chosen],
            mask_counts=self.mask_counts[chosen],
            mask_places=self.mask_places[masks],
            mask_labels=self.mask_labels[masks],
        )
