"""How many keys the tokens of a sequence see: the pairs for which attention computes something. Numpy alone."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from jaxtyping import Int64, Integer


def visible_pairs(
    lengths: Integer[np.ndarray, "*shape"], *, window: int | None, causal: bool
) -> Int64[np.ndarray, "*shape"]:
    """Returns for each sequence the sum, over its tokens, of the keys that they see.

    That is length² without a window, and length (length + 1) / 2 if attention is causal.

    Args:
        window: tokens on each side that a token sees, besides itself; None: the whole sequence.
    """
    lengths = lengths.astype(np.int64)
    reach = lengths - 1 if window is None else np.minimum(window, lengths - 1)
    reach = np.maximum(reach, 0)
    # The first tokens have fewer than `reach` before them: 0, 1, ..., reach - 1. The others have all of them.
    before = reach * (reach - 1) // 2 + (lengths - reach) * reach
    return lengths + (before if causal else 2 * before)


def total_pairs_within(lengths: Integer[np.ndarray, " N"], windows: Iterable[int]) -> dict[int, int]:
    """Returns for each window the pairs of tokens of one sequence that are at most so far apart, over all sequences.

    These are the pairs of attention that is not causal. Causal attention sees half of them and half a pair for each
    token: (pairs + tokens) / 2, with a window or without one.
    """
    return {window: int(visible_pairs(lengths, window=window, causal=False).sum()) for window in windows}


def pairs_of_average_length(length: Fraction, *, window: int) -> Fraction:
    """Returns the pairs of tokens at most `window` apart of a sequence whose length is an average."""
    reach = max(min(Fraction(window), length - 1), Fraction(0))
    return length + reach * (reach - 1) + 2 * (length - reach) * reach
