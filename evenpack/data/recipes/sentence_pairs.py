"""`sentence_pairs`: [CLS] A [SEP] B [SEP], in a token file of their own that lies beside the view."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, UInt8, UInt16

from evenpack.data.data_config import SentencePairsRecipe
from evenpack.data.recipes.view import WholeSequencesView

PAIRS = "pairs"
"""Name of the token file's pair of files, in the folder of a split."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SentencePairsView(WholeSequencesView):
    """Sequences are the documents of `token_file`. The two arrays are its columns; who wrote it has stored them."""

    recipe: SentencePairsRecipe
    first_segment_lengths: UInt16[np.ndarray, " sequences"]
    """Tokens of [CLS] A [SEP]; the rest, B [SEP], is of the other token type."""
    next_sentence_labels: UInt8[np.ndarray, " sequences"]
    """0 where B goes on behind A, 1 where it is from another document."""

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        return self.token_file.document_lengths[start:stop].astype(np.int32)

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        self._check_ids(sequence_ids)
        return self.token_file.spans(sequence_ids)

    def _save_arrays(self, directory: Path) -> None:
        """They are there."""
