"""The folder `data.tokens_dir`, which prepared sets with the same sources and tokenizer share, whatever their recipes.

    TOKENS_DIR/SOURCE_HASH/       tokens.{bin,idx}, document_hashes.npy and the journal of one source of text
    TOKENS_DIR/tokenizer_HASH/    a trained tokenizer, and the record of its training

HASH is of the origin, which is everything that decides a token file of text or a trained tokenizer, so a changed source
or tokenizer has a folder of its own, and no process overwrites files that others use. Each manifest lists the shared
files with their checksums, by paths relative to its directory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from evenpack.data.config import DataConfig
from evenpack.data.manifest import data_section, refuse_changed_inputs, refuse_differences
from evenpack.data.prepare.directory import hold_lock, remove_leftovers
from evenpack.data.recipes import SentencePairsRecipe
from evenpack.data.sources.files import InputFile
from evenpack.data.tokens.writer import read_journal

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


def refuse_other_origin(prefix: Path, origin: Origin, folder: Path) -> None:
    """Compares an origin with the one of the token file which an earlier call began; messages name `folder`.

    Raises: DataError naming what differs.
    """
    journal = read_journal(prefix)
    if journal is not None and journal.state:
        begun = journal.state["origin"]
        refuse_differences(begun["data"], origin["data"], folder)
        then, now = ([InputFile(**file) for file in one["inputs"]] for one in (begun, origin))
        refuse_changed_inputs(then, now, folder)


def origin_hash(origin: Origin) -> str:
    """Returns 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(json.dumps(origin, sort_keys=True).encode())


@contextmanager
def held_tokens(tokens_dir: Path, name: str, origin: Origin) -> Iterator[Path]:
    """Locks the folder of this origin of a source's tokens, or of `name`, and makes it if needed.

    Raises: DataError if another process works in it, or if it cannot be made.
    """
    folder = tokens_dir.absolute() / f"{name}_{origin_hash(origin)}"
    with hold_lock(folder, setting="data.tokens_dir"):
        remove_leftovers(folder)
        yield folder


def recorded_path(path: Path, directory: Path, tokens_dir: Path | None) -> str:
    """Returns a path for the manifest of `directory`: relative, or absolute for files that `prepare` did not write."""
    if path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    if tokens_dir is not None and path.is_relative_to(tokens_dir):
        return Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix()
    return str(path)
