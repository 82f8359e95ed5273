"""The source `megatron`: a pair of files of tokens, used in its original location. It holds no text."""

from pathlib import Path
from typing import NoReturn

import numpy as np

from evenpack.data.sources.config import MegatronSource
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.input_files import InputFile
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.index import bin_path, index_path
from evenpack.errors import DataError


def megatron_prefix(name: str, source: MegatronSource) -> Path:
    """Returns the common prefix of a token file's pair. Raises: DataError if it is missing or leads to no pair."""
    if source.path is None:
        raise DataError(f"source '{name}' has no path: give data.sources.{name}.path=PREFIX (of PREFIX.bin and .idx)")
    prefix = source.path.absolute()
    for path in (bin_path(prefix), index_path(prefix)):
        if not path.is_file():
            raise DataError(
                f"source '{name}': {path} does not exist; give data.sources.{name}.path=PREFIX without '.bin' or '.idx'"
            )
    return prefix


def inputs(name: str, source: MegatronSource) -> tuple[InputFile, ...]:
    """Returns both files of the pair."""
    prefix = megatron_prefix(name, source)
    return tuple(InputFile.of(path) for path in (bin_path(prefix), index_path(prefix)))


def _holds_no_text(name: str, _source: MegatronSource) -> NoReturn:
    raise DataError(f"source '{name}' is a token file: it holds no text")


KIND = SourceKind[MegatronSource](open_corpus=_holds_no_text, inputs=inputs)


def check_ends(name: str, token_file: TokenFile, *, end_of_text: int) -> None:
    """Checks the documents' ends. Raises: DataError if one does not end in the end-of-text id."""
    (unended,) = np.nonzero(~token_file.ends_in(end_of_text) & (token_file.document_lengths() > 0))
    if len(unended):
        raise DataError(
            f"source '{name}': {len(unended)} of {token_file.documents} documents of {token_file.prefix} do not end in "
            f"the end-of-text id {end_of_text}, document {unended[0]} first; write the file with Megatron-LM's "
            f"--append-eod, correct data.tokenizer.end_of_text_id, or allow it with "
            f"data.sources.{name}.require_end_of_text=false"
        )
