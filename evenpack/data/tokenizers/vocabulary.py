"""The entries of a tokenizer's vocabulary, to distinguish one vocabulary from another."""

from pathlib import Path

import tokenizers

from evenpack.errors import DataError
from evenpack.files import read_json


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


def _of_backend(path: Path) -> dict[str, int]:
    words: dict[str, int] = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return words


def _of_lines(path: Path) -> dict[str, int]:
    return {token: index for index, token in enumerate(path.read_text(encoding="utf-8").splitlines())}


def _of_json(path: Path) -> dict[str, int]:
    return {token: int(index) for token, index in read_json(path).items()}


_READERS = {"tokenizer.json": _of_backend, "vocab.txt": _of_lines, "vocab.json": _of_json}
"""Readers by file name; the first file that exists is used."""
