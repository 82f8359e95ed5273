"""Loads the tokenizer that a run file names, or trains it; reads vocabularies, to tell one from another.

A run's documents are made with a `Tokenizer`: one end-of-text after each, nothing else. A `TokenCounter` measures
single texts or pairs, including their special tokens, with any tokenizer:

    tokenizer_config.json or config.json, or a name of the hub   transformers' AutoTokenizer
    tokenizer.json alone                                         `tokenizers`
    vocab.txt alone                                              BERT's WordPiece
    vocab.json and merges.txt alone                              GPT-2's BPE, which has no special tokens around a text
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int64

from evenpack.data.sources.files import InputFile
from evenpack.data.tokenizers.backend import BACKEND_FILE, prepare_backend
from evenpack.data.tokenizers.byte_pairs import END_OF_TEXT, byte_pairs_files, read_byte_pairs, train_byte_pairs
from evenpack.data.tokenizers.config import (
    BertTokenizer,
    Gpt2Tokenizer,
    HubTokenizer,
    TokenizerConfig,
    TrainedTokenizer,
    TrainedWordPieces,
)
from evenpack.data.tokenizers.tokenizer import BOUNDS, Tokenizer
from evenpack.data.tokenizers.word_pieces import ROLES, UNKNOWN, read_word_pieces, train_word_pieces, word_pieces_file
from evenpack.errors import DataError
from evenpack.files import expand_user, read_json

_PUBLISHED = {"gpt2": 50_257, "bert": 30_522}
"""Sizes for a run file that does not name the files yet."""
_BATCH_CHARACTERS = 1 << 20
"""Characters encoded together: a token of an encoding takes about a hundred bytes."""
_CONFIG_FILES = ("tokenizer_config.json", "config.json")


def load_tokenizer(config: Gpt2Tokenizer | BertTokenizer | HubTokenizer) -> Tokenizer:
    """Loads the tokenizer that the run file names. Raises: DataError if it is missing or its vocabulary is wrong."""
    if isinstance(config, HubTokenizer):
        return _from_hub(config.name)
    if isinstance(config, BertTokenizer):
        return _load_bert(config)
    if config.path is None:
        raise DataError("the tokenizer has no path: give data.tokenizer.path=FOLDER (with vocab.json and merges.txt)")
    return _of_byte_pairs(read_byte_pairs(config.path))


def tokenizer_of_weights(folder: Path) -> Tokenizer:
    """Loads the WordPiece tokenizer in a folder, in the form of `Tokenizer.save`, transformers or `vocab.txt`.

    With `vocab.txt` alone, text is lowercased if no entry has a capital letter. Raises: DataError if there is no
    tokenizer, or a vocabulary without BERT's special tokens.
    """
    return _of_word_pieces(read_word_pieces(folder, lower_case=None))


def tokenizer_inputs(config: TokenizerConfig) -> tuple[InputFile, ...]:
    """Returns the tokenizer's files as they are now; none for a name on the hub or a tokenizer to be trained."""
    match config:
        case Gpt2Tokenizer(path=Path() as path):
            return tuple(InputFile.of(file) for file in byte_pairs_files(path))
        case BertTokenizer(path=Path() as path):
            return (InputFile.of(word_pieces_file(path)),)
        case HubTokenizer(name=name) if Path(name).is_dir():
            return tuple(InputFile.of(path) for path in sorted(Path(name).iterdir()) if path.is_file())
        case _:
            return ()


def train_tokenizer(config: TrainedTokenizer | TrainedWordPieces, texts: Iterable[str]) -> Tokenizer:
    """Trains a vocabulary on `texts`: byte-level BPE with end-of-text 0, or WordPiece as BERT's.

    The same texts give the same vocabulary. Little text yields fewer entries than requested, with a warning.

    Raises: DataError without any text.
    """
    if isinstance(config, TrainedWordPieces):
        return _of_word_pieces(train_word_pieces(config, texts))
    return _of_byte_pairs(train_byte_pairs(config, texts))


def _load_bert(config: BertTokenizer) -> Tokenizer:
    if config.name is not None:
        return _from_hub(config.name, end_role="sep_token")
    if config.path is None:
        raise DataError(
            "the tokenizer has no path: give data.tokenizer.path=FOLDER (with vocab.txt or tokenizer.json) or "
            "data.tokenizer.name=NAME of the hub"
        )
    return _of_word_pieces(read_word_pieces(config.path, lower_case=config.lower_case))


def _of_byte_pairs(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, end_of_text=END_OF_TEXT, unknown=None)


def _of_word_pieces(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, end_of_text=ROLES["sep_token"], unknown=UNKNOWN, roles=ROLES, bounds={})


def fast_tokenizer(name: str, *, hint: str = "") -> Any:
    """Loads transformers' tokenizer of a folder or of the hub.

    Raises: DataError, ending in `hint`, if there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises all errors of its readers and of the network
        raise DataError(f"AutoTokenizer.from_pretrained('{name}') failed: {error}{hint}") from error
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer '{name}' exists in Python only; one with a tokenizer.json is needed")
    return tokenizer


def _from_hub(name: str, *, end_role: str = "eos_token") -> Tokenizer:
    hint = (
        ". For a folder with only vocab.json and merges.txt give data.tokenizer.kind=gpt2, for one with vocab.txt "
        "kind=bert and path=FOLDER"
    )
    tokenizer = fast_tokenizer(name, hint=hint)
    end_of_text = getattr(tokenizer, end_role)
    if end_of_text is None:
        raise DataError(f"tokenizer '{name}' has no end-of-text token ({end_role}), which each document must end in")
    # GPT-2's class names its end-of-text as the unknown token, which a byte-level vocabulary never needs.
    unknown = None if tokenizer.unk_token == end_of_text else tokenizer.unk_token
    roles = {role: str(token) for role in ROLES if (token := getattr(tokenizer, role)) is not None}
    bounds = {role: str(token) for role in BOUNDS if (token := getattr(tokenizer, role)) is not None}
    if bounds.get("eos_token") != end_of_text:  # `load` takes an eos_token as the end of documents
        bounds.pop("eos_token", None)
    return Tokenizer(tokenizer.backend_tokenizer, end_of_text=end_of_text, unknown=unknown, roles=roles, bounds=bounds)


def vocabulary_size_of(tokenizer: TokenizerConfig) -> tuple[int, str] | None:
    """Returns the number of entries and its source, for people; None for a tokenizer of the hub, which is not queried.

    Raises: DataError for a folder without a tokenizer.
    """
    if isinstance(tokenizer, HubTokenizer) or (isinstance(tokenizer, BertTokenizer) and tokenizer.name is not None):
        return None
    if isinstance(tokenizer, Gpt2Tokenizer | BertTokenizer):
        if tokenizer.path is None:
            return _PUBLISHED[tokenizer.kind], f"that of the published {tokenizer.kind}"
        return load_tokenizer(tokenizer).vocabulary_size, f"which {tokenizer.path} holds"
    return tokenizer.vocabulary_size, "as the run file says"


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Returns each token's id, from transformers' files in a folder; None for a folder without a vocabulary.

    Raises: DataError if a file of it is broken.
    """
    for name, read in _READERS.items():
        path = folder / name
        if path.is_file():
            try:
                return read(path)
            except Exception as error:  # `tokenizers` raises bare Exception
                raise DataError(f"{path} is not a readable vocabulary: {error}") from error
    return None


def first_difference(first: dict[str, int], second: dict[str, int]) -> str | None:
    """Returns the lowest id with different tokens, and the token in each; None if there is none."""
    names, others = ({index: token for token, index in words.items()} for words in (first, second))
    for index in sorted(names.keys() | others.keys()):
        if names.get(index) != others.get(index):
            return f"id {index} is {names.get(index)!r} in one and {others.get(index)!r} in the other"
    return None


_READERS: Mapping[str, Callable[[Path], dict[str, int]]] = {
    BACKEND_FILE: lambda path: tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True),
    "vocab.txt": lambda path: tokenizers.models.WordPiece.read_file(str(path)),
    "vocab.json": lambda path: {token: int(index) for token, index in read_json(path).items()},
}
"""Readers by file name; the first file that exists is used."""


class TokenCounter:
    """Measures texts. Special tokens are never recognised within a text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Switches the backend's truncation and padding off. Raises: DataError if its vocabulary is empty."""
        prepare_backend(backend)
        self._backend = backend

    def lengths(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Int64[np.ndarray, " texts"]:
        """Returns the tokens of each text or pair, including special ones; uses all cores."""
        lengths = np.zeros(len(texts), dtype=np.int64)
        for start, stop in _batches(texts):
            encodings = self._backend.encode_batch_fast(list(texts[start:stop]))
            lengths[start:stop] = [len(encoding) for encoding in encodings]
        return lengths


def load_token_counter(name: str) -> TokenCounter:
    """Loads the tokenizer of a folder or of a name on the hub. Raises: DataError if it is missing or incomplete."""
    folder = expand_user(name)
    if not folder.is_dir() or any((folder / file).is_file() for file in _CONFIG_FILES):
        return TokenCounter(fast_tokenizer(str(folder) if folder.is_dir() else name).backend_tokenizer)
    if (path := folder / BACKEND_FILE).is_file():
        try:
            return TokenCounter(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise DataError(f"{path} holds no readable tokenizer: {error}") from error
    if (folder / "vocab.txt").is_file():
        return TokenCounter(read_word_pieces(folder, lower_case=None))
    return TokenCounter(read_byte_pairs(folder))


def _batches(texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Yields ranges of texts of about `_BATCH_CHARACTERS` each."""
    characters = np.cumsum([len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts])
    borders = 1 + np.flatnonzero(np.diff(characters // _BATCH_CHARACTERS))
    return list(pairwise([0, *borders.tolist(), len(texts)]))


def tokenizer_kind_of(folder: Path, like: str) -> str:
    """Returns the kind that reads a folder, for a model whose run file has a tokenizer of the kind `like`.

    Where that is `hub`: the kind that reads a vocabulary alone, and `hub` for whole tokenizers and names.
    """
    if like != "hub":
        return {"train": "gpt2", "train_word_pieces": "bert"}.get(like, like)
    if not (folder / BACKEND_FILE).exists():
        for kind, file in (("gpt2", "merges.txt"), ("bert", "vocab.txt")):
            if (folder / file).is_file():
                return kind
    return "hub"
