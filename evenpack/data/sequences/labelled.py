"""The sequences of a task's file, in memory, each with its label. No recipe makes them: `evenpack finetune` does.

Shapes: N = sequences of the file, K = sequences asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from evenpack.data.ranges import ranges
from evenpack.data.sequences.view import LocatedSequences, SequenceContent, TokenAccounting


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPair:
    """A sequence, including special tokens, in the halves that token types distinguish."""

    first: Int64[np.ndarray, " first"]
    second: Int64[np.ndarray, " second"]
    """The second half; empty if there is one sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSequences(LocatedSequences):
    """The sequences of a file; a `SequenceView` in which each sequence is one segment."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens of all sequences, concatenated."""
    offsets: Int64[np.ndarray, " N_plus_1"]
    """Start of each sequence among the tokens, and their number."""
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
        return cls(
            tokens=np.concatenate([half for pair in pairs for half in (pair.first, pair.second)]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
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
        return TokenAccounting.of_whole(sequences=self.count, tokens=len(self.tokens))

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        return np.diff(self.offsets)[start:stop].astype(np.int32)

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        self._check_ids(sequence_ids)
        starts = self.offsets[sequence_ids]
        return starts, self.offsets[sequence_ids + 1] - starts

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        starts, lengths = self.locate(sequence_ids)
        return SequenceContent(
            counts=self.counts(sequence_ids, lengths),
            tokens=self.tokens[ranges(starts, lengths)],
            first_lengths=self.first_lengths[sequence_ids],
            labels=self.labels[sequence_ids],
        )
