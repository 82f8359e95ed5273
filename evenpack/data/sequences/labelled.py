"""The sequences of a task's file, in memory, each with its label. No recipe makes them: `evenpack finetune` does.

Shapes: N = sequences of the file, K = sequences asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64, Shaped

from evenpack.data.sequences.view import SequenceContent, SequencesAsDocuments, TokenAccounting
from evenpack.data.tokens.own import TokenArrays


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPair:
    """A sequence, including special tokens, in the halves that token types distinguish."""

    first: Int64[np.ndarray, " first"]
    second: Int64[np.ndarray, " second"]
    """The second half; empty if there is one sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSequences(SequencesAsDocuments):
    """The sequences of a file; a `SequenceView` in which each sequence is one segment."""

    token_file: TokenArrays
    first_lengths: Int64[np.ndarray, " N"]
    """Lengths of the first halves, which have token type 0."""
    labels: Shaped[np.ndarray, " N *parts"]
    """The class (int64), the score (float32), or the answer's first and last token (int64 [N, 2]) of each."""
    max_sequence_length: int
    """No sequence is longer."""

    max_segments_per_sequence = 1

    @classmethod
    def of(
        cls,
        pairs: Sequence[TokenPair],
        labels: Shaped[np.ndarray, " N *parts"],
        *,
        max_sequence_length: int,
    ) -> "LabelledSequences":
        """Concatenates sequences; the other arguments are the fields of these names."""
        lengths = np.array([len(pair.first) + len(pair.second) for pair in pairs], dtype=np.int64)
        tokens = np.concatenate([half for pair in pairs for half in (pair.first, pair.second)])
        return cls(
            token_file=TokenArrays(tokens, np.append(0, np.cumsum(lengths))),
            first_lengths=np.array([len(pair.first) for pair in pairs], dtype=np.int64),
            labels=labels,
            max_sequence_length=max_sequence_length,
        )

    @property
    def count(self) -> int:
        return len(self.first_lengths)

    @property
    def accounting(self) -> TokenAccounting:
        """The sequences as documents of their own: what was cut from sentences is not among them."""
        return TokenAccounting.of_whole(sequences=self.count, tokens=self.token_file.tokens)

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        content = super().read(sequence_ids)
        return replace(content, first_lengths=self.first_lengths[sequence_ids], labels=self.labels[sequence_ids])
