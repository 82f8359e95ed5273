"""From documents to sequences. Recipes are views: positions of sequences are computed, and tokens stay in their file.

documents    a document is a sequence; long ones are split, truncated, dropped or refused
concat       one stream of documents, cut at a fixed length; with an atom, first shuffled in pieces of that size
padding      pieces of documents, each atom of one document and padded

and two that are not views of documents: their sequences are written by prepare/pairs.py and prepare/shards.py

sentence_pairs   [CLS] A [SEP] B [SEP]
masked_pairs     the same, finished and masked elsewhere

The sequences of a task's file (labelled.py) belong to no recipe: they stay in memory, with their labels.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.recipes import (
    ConcatRecipe,
    DocumentsRecipe,
    MaskedPairsRecipe,
    PaddingRecipe,
    Recipe,
    SentencePairsRecipe,
)
from evenpack.data.sequences.documents import DocumentsView, LabelledDocumentsView, build_documents
from evenpack.data.sequences.labelled import LabelledSequences
from evenpack.data.sequences.pairs import PAIRS, MaskedPairsView, SentencePairsView
from evenpack.data.sequences.pieces import ConcatView, PaddingView, ShuffledConcatView, build_concat, build_padding
from evenpack.data.sequences.view import (
    SequenceContent,
    SequenceCounts,
    SequenceView,
    TokenAccounting,
    length_chunks,
    open_stored,
)
from evenpack.data.tokens.file import TokenFile

__all__ = [
    "PAIRS",
    "LabelledSequences",
    "MaskedPairsView",
    "TokenAccounting",
    "SentencePairsView",
    "SequenceContent",
    "SequenceCounts",
    "SequenceView",
    "ViewOfDocuments",
    "build_view",
    "length_chunks",
    "open_view",
]


ViewOfDocuments = DocumentsView | ConcatView | ShuffledConcatView | PaddingView


def build_view(
    recipe: DocumentsRecipe | ConcatRecipe | PaddingRecipe,
    token_file: TokenFile,
    documents: Int64[np.ndarray, " documents"] | None,
    *,
    directory: Path | None = None,
) -> ViewOfDocuments:
    """Builds the sequences that `recipe` makes of `documents`, the ids of one split in ascending order; None: of all.

    With a directory the view is stored there and mapped.

    Raises: DataError if a document is too long and the recipe's policy is `error`.
    """
    if isinstance(recipe, DocumentsRecipe):
        return build_documents(recipe, token_file, documents, directory=directory)
    documents = np.arange(token_file.documents) if documents is None else documents
    view: ViewOfDocuments
    if isinstance(recipe, ConcatRecipe):
        view = build_concat(recipe, token_file, documents)
    else:
        view = build_padding(recipe, token_file, documents)
    if directory is None:
        return view
    view.save(directory)
    return open_stored(type(view), directory.absolute(), token_file, recipe)


def open_view(directory: Path, token_file: TokenFile, recipe: Recipe) -> ViewOfDocuments | SentencePairsView:
    """Opens a stored view, memory-mapped and cheap to pickle. `token_file` holds the documents; pairs have their own.

    Raises: DataError if it is missing, incomplete, or made by another recipe or for another token file.
    """
    directory = directory.absolute()
    kind: type[ViewOfDocuments | SentencePairsView]
    match recipe:
        case SentencePairsRecipe(static_masks=None):
            kind = SentencePairsView
        case SentencePairsRecipe() | MaskedPairsRecipe():
            kind = MaskedPairsView
        case ConcatRecipe(atom=None):
            kind = ConcatView
        case ConcatRecipe():
            kind = ShuffledConcatView
        case PaddingRecipe():
            kind = PaddingView
        case DocumentsRecipe():
            kind = LabelledDocumentsView if token_file.labelled else DocumentsView
    if issubclass(kind, SentencePairsView):
        token_file = TokenFile(directory / PAIRS, verify=False)
    return open_stored(kind, directory, token_file, recipe)
