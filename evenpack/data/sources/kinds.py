"""The kinds of sources, the functions of any kind, and the choice of the documents that are held out for validation."""

from typing import Any

import numpy as np
from jaxtyping import Bool, UInt64

from evenpack.data.keys import derive_key
from evenpack.data.sources.builtin import BUILTIN
from evenpack.data.sources.config import Source, SourceOfText
from evenpack.data.sources.corpus import Corpus, SourceKind
from evenpack.data.sources.file_sources import JSONL, PARQUET, TEXT
from evenpack.data.sources.files import InputFile
from evenpack.data.sources.hub import HUB
from evenpack.data.sources.rows import RowCorpus
from evenpack.data.sources.without_text import HDF5, MEGATRON

KINDS: dict[str, SourceKind[Any]] = {
    "builtin": BUILTIN,
    "jsonl": JSONL,
    "parquet": PARQUET,
    "text": TEXT,
    "hub": HUB,
    "megatron": MEGATRON,
    "hdf5": HDF5,
}
"""The kinds by `kind` in the run file."""
_SALT = 0x76616C6964617465
"""A constant salt: the split depends on the documents alone, not on the run's seed."""


def open_corpus(name: str, source: Source) -> Corpus:
    """Opens the corpus of source `name`, or the corpus of its rows.

    It finds the files and reads none of them. A dataset of the hub is loaded.

    Raises: DataError if the path is missing or leads to no file, or if the source holds tokens and no text.
    """
    corpus = KINDS[source.kind].open_corpus(name, source)
    if not isinstance(source, SourceOfText) or not source.changes_rows:
        return corpus
    return RowCorpus(name, corpus, source)


def source_inputs(name: str, source: Source) -> tuple[InputFile, ...]:
    """Returns the files of a source as they are now; none for a name on the hub, which is not queried again.

    Raises: DataError if the path is missing or leads to no file.
    """
    return KINDS[source.kind].inputs(name, source)


def held_out(identities: UInt64[np.ndarray, " N"], source: Source, fraction: float) -> Bool[np.ndarray, " N"]:
    """Returns whether each document of a source belongs to validation.

    Equal documents stay together if a hash decides, and are in both splits if the section's files contain them twice.

    Args:
        identities: `Document.stored_identity` of each document.
        fraction: the fraction that a hash holds out.
    """
    if source.has_validation_documents:
        return (identities & np.uint64(1)).astype(np.bool_)
    return derive_key(_SALT, identities) < np.uint64(int(fraction * 2.0**64))
