"""Checks of the validation split: that none of its documents is trained on, and that it has any."""

import numpy as np
from jaxtyping import UInt64

from evenpack.data.config import DataConfig
from evenpack.data.prepare.progress import Progress
from evenpack.data.sources.config import HubSource, SourceOfFiles
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.held_out import names_validation_documents
from evenpack.errors import DataError

_DOCUMENTS_AT_ONCE = 1 << 20
_QUOTED_CHARACTERS = 60


def check_overlap(
    name: str,
    source: SourceOfFiles | HubSource,
    identities: UInt64[np.ndarray, " documents"],
    corpus: Corpus,
    progress: Progress,
) -> None:
    """Counts the documents for training whose text is also that of one for validation.

    It takes 8 bytes of memory for each document for validation.

    Args:
        identities: `Document.stored_identity` of each document, possibly mapped from a file.
        corpus: read again for the message of an error.

    Raises: DataError that quotes the first one, unless the source allows them.
    """
    held_out = np.concatenate([_hashes(part, is_held_out=True) for part in _parts(identities)])
    found = [hashes[np.isin(hashes, held_out)] for part in _parts(identities) for hashes in [_hashes(part)]]
    shared = np.concatenate(found)
    if not len(shared):
        return
    if not source.allow_validation_overlap:
        key = "validation_split" if isinstance(source, HubSource) else "validation_path"
        raise DataError(
            f"source '{name}': {len(shared):,} training documents are also in its {key}, first the one that begins "
            f"{_beginning(corpus, int(shared[0]))!r}; validation documents must not be trained on: remove them from "
            f"one of the two, or allow it with data.sources.{name}.allow_validation_overlap=true"
        )
    progress.note(
        f"source '{name}': {len(shared):,} training documents are also validation documents, and are trained on "
        "(allow_validation_overlap)"
    )


def note_nothing_held_out(config: DataConfig, name: str, *, documents: int, progress: Progress) -> None:
    """Warns that no sequence of source `name`, which has so many `documents`, is held out, although that was asked."""
    warning = f"warning: source '{name}' holds nothing out, and will have no validation loss: "
    if names_validation_documents(config.sources[name]):
        progress.note(f"{warning}the recipe takes none of the documents that its section names for validation")
    elif config.validation_fraction:
        progress.note(
            f"{warning}of its {documents} documents none that the recipe takes falls into data.validation_fraction "
            f"({config.validation_fraction:g}); raise it, give the source more documents, or name files for "
            f"validation (data.sources.{name}.validation_path)"
        )


def _parts(identities: UInt64[np.ndarray, " documents"]) -> list[UInt64[np.ndarray, " part"]]:
    return [identities[begin : begin + _DOCUMENTS_AT_ONCE] for begin in range(0, len(identities), _DOCUMENTS_AT_ONCE)]


def _hashes(part: UInt64[np.ndarray, " part"], *, is_held_out: bool = False) -> UInt64[np.ndarray, " chosen"]:
    """Returns the hashes of the documents of one split, without the bit that names it."""
    one = np.uint64(1)
    chosen: UInt64[np.ndarray, " chosen"] = part[(part & one).astype(np.bool_) == is_held_out] >> one
    return chosen


def _beginning(corpus: Corpus, hashed: int) -> str:
    """Returns the first characters of the document with this hash."""
    texts = (document.text for document in corpus.documents() if document.identity >> 1 == hashed)
    return next(texts)[:_QUOTED_CHARACTERS]
