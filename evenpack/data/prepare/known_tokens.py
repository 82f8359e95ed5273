"""Tokens in a run's `data.tokens_dir`, for callers that only count.

Nothing is made, written, or requested from the hub, and no token is read.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.checksums import find_first_damage
from evenpack.data.config import ConcatRecipe, DataConfig, DocumentsRecipe, PaddingRecipe
from evenpack.data.prepare.manifest import TOKENIZER_FOLDER, TRAINED_ON
from evenpack.data.prepare.origins import tokens_origin, training_origin
from evenpack.data.prepare.shared_tokens import place_of
from evenpack.data.sequences import ViewOfDocuments, build_view
from evenpack.data.sources.config import SourceOfText
from evenpack.data.sources.held_out import held_out
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.kinds import source_inputs
from evenpack.data.tokenizers.config import (
    BertTokenizer,
    Gpt2Tokenizer,
    HubTokenizer,
    TrainedTokenizer,
    TrainedWordPieces,
)
from evenpack.data.tokenizers.loading import load_tokenizer, tokenizer_inputs
from evenpack.data.tokens.file import TokenFile, hashes_path, read_journal
from evenpack.errors import DataError
from evenpack.files import read_json_object


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
        prefix = place_of(config.tokens_dir, name, origin) / "tokens"
        journal = read_journal(prefix)
        if journal is None or not journal.complete:
            return None
        hashes = hashes_path(prefix)
        damage = find_first_damage(hashes, journal.checksums[hashes.name])
        if damage is not None:
            raise DataError(f"{damage.describe()}; remove the folder {prefix.parent} and prepare again")
        is_held_out = held_out(np.load(hashes), source, config.validation_fraction)
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
        place = place_of(tokens_dir, TOKENIZER_FOLDER, training_origin(config, inputs))
        return (read_json_object(place / TRAINED_ON) or {}).get("checksum")
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
