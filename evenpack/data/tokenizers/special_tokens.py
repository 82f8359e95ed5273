"""What pairs of sentences and their masks need to know of a vocabulary."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from evenpack.errors import DataError

SENTENCE_LENGTHS = "sentence_lengths"
"""The column of a token file that stores the sentences of its documents."""


@dataclass(frozen=True, kw_only=True)
class PairTokens:
    """The special-token ids of sentence pairs and their masks."""

    classification_id: int
    """[CLS], a pair's first token."""
    separator_id: int
    """[SEP], after each segment."""
    mask_id: int
    """[MASK]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskingVocabulary:
    """The properties of the vocabulary that masking needs."""

    mask_id: int
    special: Bool[np.ndarray, " vocabulary"]
    """Tokens that are never masked and never drawn: [CLS], [SEP], [MASK], [PAD]."""
    continues: Bool[np.ndarray, " vocabulary"]
    """Whether a token continues the word before."""

    def __post_init__(self) -> None:
        if self.special.all():
            raise ValueError(
                f"all {len(self.special)} entries of the vocabulary are special tokens: none could be drawn"
            )

    def require_words(self) -> None:
        """Raises DataError if no token continues a word, as in a byte-level vocabulary: words are not known then."""
        if not self.continues.any():
            raise DataError(
                "whole_words masks the pieces of a word together, which a WordPiece vocabulary marks with ##, and none "
                f"of these {len(self.special)} entries begins so: set whole_words=false, or take a WordPiece vocabulary"
            )

    @cached_property
    def ordinary_ids(self) -> Int64[np.ndarray, " ordinary"]:
        """The ids from which a random token is drawn."""
        return np.flatnonzero(~self.special)
