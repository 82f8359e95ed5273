"""Which documents are held out for validation."""

import numpy as np
from jaxtyping import Bool, UInt64

from evenpack.data.order.permutation import derive_key

_SALT = 0x76616C6964617465
"""Fixed for ever: the split follows the documents alone, not the run's seed."""


def held_out(identities: UInt64[np.ndarray, " N"], fraction: float) -> Bool[np.ndarray, " N"]:
    """Whether each document belongs to validation; equal documents (equal `Document.identity`) stay together."""
    return derive_key(_SALT, identities) < np.uint64(int(fraction * 2.0**64))
