"""The folder `data.tokens_dir`, which prepared sets with the same sources and tokenizer share, whatever their recipes.

    TOKENS_DIR/SOURCE_HASH/       tokens.{bin,idx}, document_hashes.npy and the journal of one source of text
    TOKENS_DIR/tokenizer_HASH/    a trained tokenizer, and the record of its training

HASH is of the origin, which is everything that decides a token file of text or a trained tokenizer, so a changed source
or tokenizer has a folder of its own, and no process overwrites files that others use. Each manifest lists the shared
files with their checksums, by paths relative to its directory.

`find_tokens` is for callers that only count: nothing is made, written, or requested from the hub, and no token is read.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int64

from evenpack.data.checksums import find_first_damage
from evenpack.data.config import DataConfig
from evenpack.data.manifest import TOKENIZER_FOLDER, TRAINED_ON, data_section, refuse_changed_inputs, refuse_differences
from evenpack.data.prepare.directory import hold_lock, remove_leftovers
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe, SentencePairsRecipe
from evenpack.data.sequences import ViewOfDocuments, build_view
from evenpack.data.sources.config import SourceOfText
from evenpack.data.sources.files import InputFile
from evenpack.data.sources.kinds import held_out, source_inputs
from evenpack.data.tokenizers.config import (
    BertTokenizer,
    Gpt2Tokenizer,
    HubTokenizer,
    TrainedTokenizer,
    TrainedWordPieces,
)
from evenpack.data.tokenizers.loading import load_tokenizer, tokenizer_inputs
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import damaged_file_error, hashes_path, journal_path, read_journal
from evenpack.errors import DataError
from evenpack.files import read_json_object

Origin = dict[str, Any]
"""An origin: `data` holds parts of a data section, `inputs` the files that were read."""


def sentence_language(config: DataConfig) -> str | None:
    """Returns the language whose rules split documents before tokenising; None if they are tokenised whole."""
    return config.recipe.language if isinstance(config.recipe, SentencePairsRecipe) else None


def tokens_origin(config: DataConfig, name: str, inputs: Iterable[InputFile], *, tokenizer_checksum: str) -> Origin:
    """Returns the origin of the token file of a text source, which contains nothing of a recipe but a language."""
    language = sentence_language(config)
    section = data_section(config)["sources"][name]
    section.pop("allow_validation_overlap", None)  # asked of tokens, once they are there
    sentences = {} if language is None else {"recipe": {"language": language}}
    return {
        "data": {"sources": {name: section}, "tokenizer": {"checksum": tokenizer_checksum}, **sentences},
        "inputs": [file.model_dump() for file in inputs],
    }


def training_origin(config: DataConfig, inputs: Mapping[str, Iterable[InputFile]]) -> Origin:
    """Returns the origin of a tokenizer that is trained on the documents of all sources that are not held out."""
    section = data_section(config)
    return {
        "data": {key: section[key] for key in ("tokenizer", "validation_fraction", "sources")},
        "inputs": [file.model_dump() for files in inputs.values() for file in files],
    }


def input_files(origin: Origin) -> list[InputFile]:
    """Returns the files that were read."""
    return [InputFile(**file) for file in origin["inputs"]]


def refuse_other_origin(prefix: Path, origin: Origin, folder: Path) -> None:
    """Compares an origin with the one of the token file which an earlier call began; messages name `folder`.

    Raises: DataError naming what differs.
    """
    journal = read_journal(prefix)
    if journal is not None and journal.state:
        begun = journal.state["origin"]
        refuse_differences(begun["data"], origin["data"], folder)
        refuse_changed_inputs(input_files(begun), input_files(origin), folder)


def origin_hash(origin: Origin) -> str:
    """Returns 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(json.dumps(origin, sort_keys=True).encode())


@contextmanager
def held_tokens(tokens_dir: Path, name: str, origin: Origin) -> Iterator[Path]:
    """Locks the folder of this origin, and makes it if needed.

    Raises: DataError if another process works in it, or if it cannot be made.
    """
    folder = folder_of_origin(tokens_dir, name, origin)
    with hold_lock(folder, setting="data.tokens_dir"):
        remove_leftovers(folder)
        yield folder


def folder_of_origin(tokens_dir: Path, name: str, origin: Origin) -> Path:
    """Returns the folder of the tokens of a source, or of `name`, with this origin."""
    return tokens_dir.absolute() / f"{name}_{origin_hash(origin)}"


def recorded_path(path: Path, directory: Path, tokens_dir: Path | None) -> str:
    """Returns a path for the manifest of `directory`: relative, or absolute for files that `prepare` did not write."""
    if path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    if tokens_dir is not None and path.is_relative_to(tokens_dir):
        return Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix()
    return str(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownTokens:
    """The tokens of one source."""

    token_file: TokenFile
    training_documents: Int64[np.ndarray, " documents"]
    """Documents that are not held out, in ascending order."""
    vocabulary_size: int

    def training_view(self, recipe: DocumentsRecipe | ConcatRecipe | PaddingRecipe) -> ViewOfDocuments:
        """Returns the sequences of training, in memory only. Raises: DataError as `build_view`."""
        return build_view(recipe, self.token_file, self.training_documents)


def find_tokens(config: DataConfig) -> dict[str, KnownTokens] | None:
    """Returns the tokens of all sources, by name, if each has been tokenised completely and has not changed.

    It returns None otherwise, and for recipes whose sequences are not views of documents or are packed block by block.

    Raises: DataError for a token file that was complete and is not any more.
    """
    of_documents = isinstance(config.recipe, DocumentsRecipe | ConcatRecipe | PaddingRecipe)
    if config.tokens_dir is None or not of_documents or config.shuffle.kind != "permutation":
        return None
    try:
        inputs = {name: source_inputs(name, source) for name, source in config.sources.items()}
        checksum = _tokenizer_checksum(config, config.tokens_dir, inputs)
    except DataError:
        return None  # no path, no file, or no readable file: `prepare` reports it
    if checksum is None or not all(isinstance(source, SourceOfText) for source in config.sources.values()):
        return None
    known = {}
    for name, source in config.sources.items():
        origin = tokens_origin(config, name, inputs[name], tokenizer_checksum=checksum)
        prefix = folder_of_origin(config.tokens_dir, name, origin) / "tokens"
        journal = read_journal(prefix)
        if journal is None or not journal.complete:
            return None
        hashes = hashes_path(prefix)
        damage = find_first_damage(hashes, journal.checksums[hashes.name])
        if damage is not None:
            raise damaged_file_error(damage, journal_path(prefix))
        is_held_out = held_out(open_array(hashes), source, config.validation_fraction)
        known[name] = KnownTokens(
            token_file=TokenFile(prefix),
            training_documents=np.flatnonzero(~is_held_out),
            vocabulary_size=journal.vocabulary_size,
        )
    return known


def _tokenizer_checksum(config: DataConfig, tokens_dir: Path, inputs: dict[str, tuple[InputFile, ...]]) -> str | None:
    """Returns the checksum; None if the tokenizer is not trained yet, or on the hub.

    Raises: DataError for a missing one.
    """
    tokenizer = config.tokenizer
    if isinstance(tokenizer, TrainedTokenizer | TrainedWordPieces):
        folder = folder_of_origin(tokens_dir, TOKENIZER_FOLDER, training_origin(config, inputs))
        return (read_json_object(folder / TRAINED_ON) or {}).get("checksum")
    if isinstance(tokenizer, Gpt2Tokenizer | BertTokenizer | HubTokenizer):
        files = tokenizer_inputs(tokenizer)
        return _loaded_checksum(tokenizer, files) if files else None
    return None


@lru_cache(maxsize=4)
def _loaded_checksum(tokenizer: Gpt2Tokenizer | BertTokenizer | HubTokenizer, files: tuple[InputFile, ...]) -> str:
    """Returns the checksum, cached for the arms of a grid: reading a vocabulary takes half a second.

    `files`: its files.
    """
    return load_tokenizer(tokenizer).checksum
