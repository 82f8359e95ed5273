"""Examples as sequences of tokens.

Shapes: N = sequences of a file, tokens = all of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Shaped


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPair:
    """A sequence, including special tokens, in the halves that token types distinguish."""

    first: Int64[np.ndarray, " first"]
    second: Int64[np.ndarray, " second"]
    """The second half; empty if there is one sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The sequences of a file, with the targets of each."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens of all sequences, concatenated."""
    lengths: Int64[np.ndarray, " N"]
    first_lengths: Int64[np.ndarray, " N"]
    """Lengths of the first halves, which have token type 0."""
    labels: Shaped[np.ndarray, " N *parts"]
    """Targets: the class (int64), the score (float32), or the answer's first and last token (int64 [N, 2]) of each."""
    cut_sequences: int
    """Number of sequences that were cut because they were too long."""

    @property
    def starts(self) -> Int64[np.ndarray, " N"]:
        """Returns the start of each sequence among the tokens."""
        starts: Int64[np.ndarray, " N"] = np.cumsum(self.lengths) - self.lengths
        return starts

    @property
    def sequences(self) -> int:
        return len(self.lengths)


def features_of(pairs: Sequence[TokenPair], labels: Shaped[np.ndarray, " N *parts"], *, cut_sequences: int) -> Features:
    """Concatenates sequences. For `labels` see `Features`."""
    return Features(
        tokens=np.concatenate([part for pair in pairs for part in (pair.first, pair.second)]),
        lengths=np.array([len(pair.first) + len(pair.second) for pair in pairs], dtype=np.int64),
        first_lengths=np.array([len(pair.first) for pair in pairs], dtype=np.int64),
        labels=labels,
        cut_sequences=cut_sequences,
    )
