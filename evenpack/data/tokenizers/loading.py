"""Loads the tokenizer that a run file names, or trains it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from evenpack.data.sources.input_files import InputFile
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
from evenpack.data.tokenizers.word_pieces import (
    ROLES,
    UNKNOWN,
    read_word_pieces,
    train_word_pieces,
    word_pieces_file,
)
from evenpack.errors import DataError


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
