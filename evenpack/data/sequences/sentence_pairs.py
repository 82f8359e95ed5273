"""The recipes `sentence_pairs` and `masked_pairs`: [CLS] A [SEP] B [SEP], in a token file stored with the view."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt16

from evenpack.data.config import MaskedPairsRecipe, SentencePairsRecipe
from evenpack.data.sequences.static_masks import StaticMasks
from evenpack.data.sequences.view import WholeSequencesView
from evenpack.errors import DataError

PAIRS = "pairs"
"""Name of the token file's pair of files, in the folder of a split."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SentencePairsView(WholeSequencesView):
    """Pairs that are the documents of `token_file`. The two arrays are columns stored by the writer of that file."""

    recipe: SentencePairsRecipe | MaskedPairsRecipe
    first_segment_lengths: UInt16[np.ndarray, " sequences"]
    """Tokens of [CLS] A [SEP]; the others, B [SEP], are of the other token type."""
    next_sentence_labels: UInt8[np.ndarray, " sequences"]
    """Label: 0 where B follows A in its document, 1 where it is from another document."""

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        return self.token_file.document_lengths(start, stop).astype(np.int32)

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        self._check_ids(sequence_ids)
        return self.token_file.spans(sequence_ids)

    def _save_arrays(self, directory: Path) -> None:
        """Does nothing: the columns are stored already."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedPairsView(SentencePairsView):
    """Pairs whose tokens are masked already (`static_masks`, `masked_pairs`); the arrays are those of `StaticMasks`.

    Raises: DataError if the arrays do not fit one another or the pairs.
    """

    mask_offsets: Int64[np.ndarray, " sequences_plus_1"]
    mask_positions: UInt16[np.ndarray, " masks"]
    mask_labels: Int32[np.ndarray, " labels"]
    most_masks: UInt16[np.ndarray, " lengths"]

    def __post_init__(self) -> None:
        found = (len(self.mask_offsets) - 1, len(self.most_masks) - 1)
        if found != (self.count, self.max_sequence_length):
            raise DataError(
                f"the stored masks in {self.directory or self.token_file.prefix} do not fit the pairs: mask_offsets "
                f"and most_masks are of {found[0]} sequences of up to {found[1]} tokens, expected {self.count} of up "
                f"to {self.max_sequence_length}; prepare again"
            )
        _ = self.masks

    @cached_property
    def masks(self) -> StaticMasks:
        """The masks by sequence."""
        return StaticMasks(
            mask_offsets=self.mask_offsets,
            mask_positions=self.mask_positions,
            mask_labels=self.mask_labels,
            most_masks=self.most_masks,
        )
