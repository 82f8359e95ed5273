"""How many keys the tokens of a sequence see: the pairs for which attention computes something. Numpy alone."""

import numpy as np
from jaxtyping import Int64, Integer


def visible_pairs(lengths: Integer[np.ndarray, " N"], *, window: int | None, causal: bool) -> Int64[np.ndarray, " N"]:
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
    pairs: Int64[np.ndarray, " N"] = lengths + (before if causal else 2 * before)
    return pairs
