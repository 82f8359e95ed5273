"""Origins: everything that decides a token file of text or a trained tokenizer; stored in journals and folder names."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from evenpack.data.config import DataConfig, SentencePairsRecipe
from evenpack.data.prepare.manifest import data_section
from evenpack.data.sources.input_files import InputFile

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


def origin_hash(origin: Origin) -> str:
    """Returns 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(json.dumps(origin, sort_keys=True).encode())
