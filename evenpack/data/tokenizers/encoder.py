"""Any tokenizer as an encoder of a single text or pair, including its special tokens.

A run's documents are made with `tokenizer.Tokenizer` instead: one end-of-text after each, nothing else.

    tokenizer_config.json or config.json, or a name of the hub   transformers' AutoTokenizer
    tokenizer.json alone                                         `tokenizers`
    vocab.txt alone                                              BERT's WordPiece
    vocab.json and merges.txt alone                              GPT-2's BPE, which has no special tokens around a text
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int64

from evenpack.data.tokenizers.byte_pairs import read_byte_pairs
from evenpack.data.tokenizers.loading import fast_tokenizer
from evenpack.data.tokenizers.word_pieces import read_word_pieces
from evenpack.errors import DataError

_BATCH_CHARACTERS = 1 << 20
"""Characters encoded together: a token of an encoding takes about a hundred bytes."""

_CONFIG_FILES = ("tokenizer_config.json", "config.json")


class Encoder:
    """Measures texts. Special tokens are never recognised within a text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Switches the backend's truncation and padding off. Raises: DataError if its vocabulary is empty."""
        if backend.get_vocab_size(with_added_tokens=False) == 0:
            raise DataError("the tokenizer's vocabulary is empty: a file of it is missing or was not found")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend

    def lengths(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Int64[np.ndarray, " texts"]:
        """Returns the tokens of each text or pair, including special ones; uses all cores."""
        lengths = np.zeros(len(texts), dtype=np.int64)
        for start, stop in _batches(texts):
            encodings = self._backend.encode_batch_fast(list(texts[start:stop]))
            lengths[start:stop] = [len(encoding) for encoding in encodings]
        return lengths


def load_encoder(name: str) -> Encoder:
    """Loads the tokenizer of a folder or of a name on the hub. Raises: DataError if it is missing or incomplete."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or any((folder / file).is_file() for file in _CONFIG_FILES):
        return Encoder(fast_tokenizer(str(folder) if folder.is_dir() else name).backend_tokenizer)
    if (folder / "tokenizer.json").is_file():
        try:
            return Encoder(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise DataError(f"{folder / 'tokenizer.json'} holds no readable tokenizer: {error}") from error
    if (folder / "vocab.txt").is_file():
        return Encoder(read_word_pieces(folder, lower_case=None))
    return Encoder(read_byte_pairs(folder))


def _batches(texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Yields ranges of texts of about `_BATCH_CHARACTERS` each."""
    characters = np.cumsum([len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts])
    borders = 1 + np.flatnonzero(np.diff(characters // _BATCH_CHARACTERS))
    return list(pairwise([0, *borders.tolist(), len(texts)]))
