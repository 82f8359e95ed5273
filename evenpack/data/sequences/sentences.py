"""Documents as sentences: `sentencex` splits the text, and a token file stores where its sentences end.

The token file is the usual one, whole documents with an end-of-text after each; its column `sentence_lengths` holds the
tokens of every sentence, document after document.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.tokenizers.tokenizer import SENTENCE_LENGTHS
from evenpack.data.tokens.file import TokenFile, column_path
from evenpack.errors import DataError

LANGUAGES_WITH_RULES = frozenset(
    "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk".split()  # noqa: SIM905  # a list would take 33 lines
)
"""Languages for which `sentencex` 1.0 has rules; another gets those of a related language, or English ones."""


def split_sentences(text: str, language: str) -> list[str]:
    """Returns the sentences of a text, including white space; a line break between paragraphs also ends a sentence."""
    from sentencex import segment

    return list(segment(language, text))


@dataclass(frozen=True, kw_only=True, eq=False)
class SentenceIndex:
    """The positions of the sentences of a token file; S = sentences, D = documents.

    Positions count only the tokens of text. The file holds one end-of-text for each earlier document, so position p of
    document d is token p + d of the file. Memory: 8 bytes per sentence and 8 bytes per document.
    """

    token_file: TokenFile
    places: Int64[np.ndarray, " S_plus_1"]
    """Start of each sentence, and the number of tokens of text. Ascending: no sentence is empty."""
    first_sentences: Int64[np.ndarray, " D_plus_1"]
    """The first sentence of each document, and the number of sentences."""

    @classmethod
    def open(cls, token_file: TokenFile) -> "SentenceIndex":
        """Reads the column. Raises: DataError if it is missing or is not of this token file."""
        path = column_path(token_file.prefix, SENTENCE_LENGTHS)
        try:
            lengths = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path} is not readable ({error}); remove the folder {path.parent} and prepare again"
            ) from error
        return cls.of(token_file, lengths)

    @classmethod
    def of(cls, token_file: TokenFile, sentence_lengths: Integer[np.ndarray, " S"]) -> "SentenceIndex":
        """Builds the index. Raises: DataError if the sentences do not end where the documents end."""
        places = np.zeros(len(sentence_lengths) + 1, dtype=np.int64)
        np.cumsum(sentence_lengths, out=places[1:])
        document_places = token_file.document_offsets - np.arange(token_file.documents + 1)
        first_sentences = np.searchsorted(places, document_places)
        found = places[np.minimum(first_sentences, len(sentence_lengths))]
        if (found != document_places).any() or first_sentences[-1] != len(sentence_lengths):
            raise DataError(
                f"the sentences of {token_file.prefix} do not end where its documents end: they are of another "
                f"file; remove the folder {token_file.prefix.parent} and prepare again"
            )
        return cls(token_file=token_file, places=places, first_sentences=first_sentences)
