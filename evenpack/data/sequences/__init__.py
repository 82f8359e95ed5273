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

from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe
from evenpack.data.sequences.documents import DocumentsView, LabelledDocumentsView, build_documents
from evenpack.data.sequences.labelled import LabelledSequences
from evenpack.data.sequences.pairs import PAIRS, MaskedPairsView, SentencePairsView
from evenpack.data.sequences.pieces import ConcatView, PaddingView, ShuffledConcatView, build_concat, build_padding
from evenpack.data.sequences.view import SequenceView, TokenAccounting, length_chunks, open_stored, read_description
from evenpack.data.tokens.file import TokenFile

__all__ = [
    "PAIRS",
    "LabelledDocumentsView",
    "LabelledSequences",
    "MaskedPairsView",
    "PaddingView",
    "TokenAccounting",
    "SentencePairsView",
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
    return open_stored(type(view), directory.absolute(), token_file)


def open_view(directory: Path, token_file: TokenFile) -> ViewOfDocuments | SentencePairsView:
    """Opens a stored view, memory-mapped and cheap to pickle. `token_file` holds the documents; pairs have their own.

    Raises: DataError if it is missing, incomplete, or made for another token file.
    """
    directory = directory.absolute()
    recipe = read_description(directory)["recipe"]
    match recipe["kind"]:
        case "sentence_pairs":
            kind = SentencePairsView if recipe.get("static_masks") is None else MaskedPairsView
            return open_stored(kind, directory, TokenFile(directory / PAIRS, verify=False))
        case "masked_pairs":
            return open_stored(MaskedPairsView, directory, TokenFile(directory / PAIRS, verify=False))
        case "concat":
            if recipe.get("atom") is None:
                return open_stored(ConcatView, directory, token_file)
            return open_stored(ShuffledConcatView, directory, token_file)
        case "padding":
            return open_stored(PaddingView, directory, token_file)
        case _:
            return open_stored(LabelledDocumentsView if token_file.labelled else DocumentsView, directory, token_file)
