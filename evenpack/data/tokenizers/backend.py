"""What all tokenizers have in common, whatever their files: the backend, which is a `tokenizers.Tokenizer`."""

import logging
from pathlib import Path

import tokenizers

from evenpack.errors import DataError

BACKEND_FILE = "tokenizer.json"
"""Name of the file that describes a backend completely."""
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


def prepare_backend(backend: tokenizers.Tokenizer) -> None:
    """Lets it encode whole texts, without padding, and without recognising special tokens in them.

    Raises: DataError if its vocabulary is empty.
    """
    if backend.get_vocab_size(with_added_tokens=False) == 0:
        raise DataError("the tokenizer's vocabulary is empty: a file of it is missing or was not found")
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True


def warn_if_smaller(size: int, wanted: int) -> None:
    """Logs a warning if a trained vocabulary has fewer entries than requested."""
    if size < wanted:
        log.warning("the text yields a vocabulary of %d entries, fewer than %d", size, wanted)
