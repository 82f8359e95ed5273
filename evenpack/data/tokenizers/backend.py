"""What all tokenizers have in common, whatever their files: the backend, which is a `tokenizers.Tokenizer`."""

import json
import logging
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from evenpack.errors import DataError

BACKEND_FILE = "tokenizer.json"
"""Name of the file that describes a backend completely."""
_NEVER_IN_TEXT = "\ufdd0"
"""A code point that Unicode keeps from text for ever ("noncharacter")."""
_MOST_NAMED = 3
log = logging.getLogger(__name__)


def first_file(directory: Path, *names: str) -> Path:
    """Returns the first of these files that a folder holds. Raises: DataError if it holds none."""
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(
        f"tokenizer folder {directory} {'holds no' if directory.is_dir() else 'does not exist: expected'} "
        f"{' or '.join(names)}; give data.tokenizer.path=FOLDER"
    )


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, and nothing else. Raises: DataError if it is not readable."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(f"{path} holds no readable tokenizer: {error}") from error


def prepare_backend(backend: tokenizers.Tokenizer, special: Collection[str] = (), *, is_said: bool = True) -> None:
    """Lets it encode whole texts, the same each time, without padding, and without recognising special tokens in them.

    Args:
        special: tokens of the vocabulary that are special, whether its file says so or not.
        is_said: whether a warning names those that it would find in text otherwise.

    Raises: DataError if its vocabulary is empty.
    """
    if backend.get_vocab_size(with_added_tokens=False) == 0:
        raise DataError("the tokenizer's vocabulary is empty: a file of it is missing or was not found")
    known = {str(token) for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in special if token not in known and backend.token_to_id(token) is not None]
    found = sorted({*map(str, backend.get_added_tokens_decoder().values())} & {*missing})
    if found and is_said:
        warn_once(
            f"the tokenizer's files find {', '.join(map(repr, found[:_MOST_NAMED]))} in text, {len(found)} in all, "
            "which are special tokens by tokenizer_config.json or data.tokenizer.kind: in documents such a spelling "
            "becomes the tokens of its characters, and in a prompt of the exported tokenizer the special token. What "
            "documents are to hold as a token must not be among the special ones of tokenizer_config.json"
        )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None):
        warn_once(
            f"the tokenizer's BPE drops merges at random (dropout {backend.model.dropout:g}), which would make each "
            "encoding of a text another one: it is switched off"
        )
        backend.model.dropout = None


def guarded_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the special tokens that text never becomes, with their ids; a single character is a part of text."""
    added = backend.get_added_tokens_decoder()
    return {str(token): index for index, token in added.items() if token.special and len(str(token)) > 1}


def unknown_of(backend: tokenizers.Tokenizer) -> str | None:
    """Returns the token that the model itself makes of what it cannot express; None if it has none."""
    if isinstance(backend.model, models.Unigram):  # whose attributes do not tell
        index = json.loads(backend.to_str())["model"]["unk_id"]
        return None if index is None else str(backend.model.id_to_token(index))
    token = backend.model.unk_token
    return None if token is None or backend.model.token_to_id(token) is None else str(token)


def text_encoder(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns an encoder with the ids of a prepared `backend`, except where that makes a special token of text.

    `tokenizers` does not look for special tokens in a text (`encode_special_tokens`), but a model whose own vocabulary
    holds one as a piece, as Unigram's does, forms it all the same. Such pieces get a name here that no text spells, so
    that their spelling is divided into other pieces. The ids, and the backend, stay as they are.
    """
    formed = [token for token, index in guarded_tokens(backend).items() if _forms(backend, token, index)]
    if not formed:
        return backend
    values = json.loads(backend.to_str())
    names = {token: f"{_NEVER_IN_TEXT}{token}{_NEVER_IN_TEXT}" for token in formed}
    _rename(values["model"], names)
    for token in values["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    encoder = tokenizers.Tokenizer.from_str(json.dumps(values))
    encoder.encode_special_tokens = True
    return encoder


def _forms(backend: tokenizers.Tokenizer, token: str, index: int) -> bool:
    """Returns whether the model may make this id of the token's spelling, somewhere in a word."""
    if getattr(backend.model, "end_of_word_suffix", None):  # alone, the spelling is the end of a word
        return backend.model.token_to_id(token) is not None
    try:
        return any(piece.id == index for piece in backend.model.tokenize(token))
    except Exception:  # a text that the model cannot express, without an unknown token
        return False


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames pieces of a model; the merges that make one, or go on from one, go."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    if model["unk_token"] in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model["continuing_subword_prefix"] or ""
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if not names.keys() & {left, right, left + right.removeprefix(prefix)}
        ]


@cache
def warn_once(message: str) -> None:
    """Logs a warning once in this process, since one command may load a tokenizer for several purposes."""
    log.warning(message)


def warn_if_smaller(size: int, wanted: int) -> None:
    """Logs a warning if a trained vocabulary has fewer entries than requested."""
    if size < wanted:
        log.warning("the text yields a vocabulary of %d entries, fewer than %d", size, wanted)
