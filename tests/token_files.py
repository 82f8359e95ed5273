"""Writes small token files for tests."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import DOCUMENT_HASHES, TokenFileWriter

END = 7
"""The end-of-text of `numbered_tokens`."""


def numbered_tokens(prefix: Path, lengths: list[int]) -> TokenFile:
    """Writes documents of these lengths; all tokens of the file differ except their ends."""
    tokens = 100 + np.arange(sum(lengths))
    tokens[np.cumsum(lengths) - 1] = END
    with TokenFileWriter(prefix, vocabulary_size=1_000_000) as writer:
        writer.append(tokens, np.array(lengths), {"document_hashes": np.zeros(len(lengths), dtype=np.uint64)})
        writer.finish()
    return TokenFile(prefix)


def make_documents(count: int, *, vocabulary_size: int, seed: int = 0, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary_size, length) for length in rng.integers(1, longest, count)]


def hashes_of(documents: list[np.ndarray]) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(document.tobytes()) for document in documents], dtype=np.uint64)


def append_documents(writer: TokenFileWriter, documents: list[np.ndarray], hashes: np.ndarray) -> None:
    """Appends documents, with their hashes as the only column."""
    if documents:
        lengths = np.array([len(document) for document in documents])
        writer.append(np.concatenate(documents), lengths, {DOCUMENT_HASHES: hashes})


def write(prefix: Path, documents: list[np.ndarray], *, vocabulary_size: int = 50_257) -> TokenFile:
    with TokenFileWriter(prefix, vocabulary_size=vocabulary_size) as writer:
        append_documents(writer, documents, hashes_of(documents))
        writer.finish()
    return TokenFile(prefix)


def all_documents(tokens: TokenFile) -> list[list[int]]:
    offsets = tokens.document_offsets.tolist()
    return [tokens.read(start, stop).tolist() for start, stop in pairwise(offsets)]


def left_out_of(view: Any, sequence_ids: np.ndarray, predicted: str) -> Any:
    """Returns which tokens the sequences of a view leave out of the loss with another `end_of_text_in_loss`."""
    recipe = view.recipe.model_copy(update={"end_of_text_in_loss": predicted})
    return replace(view, recipe=recipe).read(sequence_ids).left_out
