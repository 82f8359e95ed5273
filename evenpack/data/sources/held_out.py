"""Chooses the documents that are held out for validation.

A hash of the document decides, unless the source's section names documents for validation: then the lowest bit of each
stored identity says whether it is one of them.
"""

import numpy as np
from jaxtyping import Bool, UInt64

from evenpack.data.order.permutation import derive_key
from evenpack.data.sources.config import Source, SourceOfText

_SALT = 0x76616C6964617465
"""A constant salt: the split depends on the documents alone, not on the run's seed."""


def held_out(identities: UInt64[np.ndarray, " N"], source: Source, fraction: float) -> Bool[np.ndarray, " N"]:
    """Returns whether each document of a source belongs to validation.

    Equal documents stay together if a hash decides, and are in both splits if the section's files contain them twice.

    Args:
        identities: `Document.stored_identity` of each document.
        fraction: the fraction that a hash holds out.
    """
    if names_validation_documents(source):
        return (identities & np.uint64(1)).astype(np.bool_)
    return derive_key(_SALT, identities) < np.uint64(int(fraction * 2.0**64))


def names_validation_documents(source: Source) -> bool:
    """Returns whether the section of a source of text names the documents for validation."""
    return isinstance(source, SourceOfText) and source.has_validation_documents
