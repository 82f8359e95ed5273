"""Chooses the documents that are held out for validation."""

import numpy as np
from jaxtyping import Bool, UInt64

from evenpack.data.order.permutation import derive_key

_SALT = 0x76616C6964617465
"""A constant salt: the split depends on the documents alone, not on the run's seed."""


def held_out(identities: UInt64[np.ndarray, " N"], fraction: float) -> Bool[np.ndarray, " N"]:
    """Returns whether each document belongs to validation.

    Equal documents (equal `Document.identity`) stay together.
    """
    return derive_key(_SALT, identities) < np.uint64(int(fraction * 2.0**64))
