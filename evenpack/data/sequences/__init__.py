"""From documents to sequences. Recipes are views: where a sequence lies is computed, its tokens stay in the file.

documents    a document is a sequence; long ones are split, truncated, dropped or refused
concat       one stream of documents, cut at a fixed length

and two that are no views of documents: their sequences are written by prepare/pairs.py and prepare/shards.py

sentence_pairs   [CLS] A [SEP] B [SEP]
masked_pairs     the same, finished and masked elsewhere
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.config import ConcatRecipe, DocumentsRecipe
from evenpack.data.sequences.accounting import TokenAccounting
from evenpack.data.sequences.concat import ConcatView, build_concat
from evenpack.data.sequences.documents import DocumentsView, build_documents
from evenpack.data.sequences.sentence_pairs import PAIRS, MaskedPairsView, SentencePairsView
from evenpack.data.sequences.view import SequenceView, length_chunks, open_stored, read_description
from evenpack.data.tokens.file import TokenFile

__all__ = [
    "PAIRS",
    "MaskedPairsView",
    "TokenAccounting",
    "SentencePairsView",
    "SequenceView",
    "build_view",
    "length_chunks",
    "open_view",
]


def build_view(
    recipe: DocumentsRecipe | ConcatRecipe, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
) -> DocumentsView | ConcatView:
    """The sequences that `recipe` makes of `documents`, the ids of one split in ascending order; `save` stores them.

    Raises: DataError if a document is too long and the recipe's policy is `error`.
    """
    if isinstance(recipe, ConcatRecipe):
        return build_concat(recipe, token_file, documents)
    return build_documents(recipe, token_file, documents)


def open_view(directory: Path, token_file: TokenFile) -> DocumentsView | ConcatView | SentencePairsView:
    """A stored view, memory-mapped and cheap to pickle. `token_file` holds the documents; pairs have their own.

    Raises: DataError if it is not there, not whole, or made for another token file.
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
            return open_stored(ConcatView, directory, token_file)
        case _:
            return open_stored(DocumentsView, directory, token_file)
