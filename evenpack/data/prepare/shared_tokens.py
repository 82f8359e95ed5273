"""The folder `data.tokens_dir`, which prepared sets with the same sources and tokenizer share, whatever their recipes.

    TOKENS_DIR/SOURCE_HASH/       tokens.{bin,idx}, document_hashes.npy and the journal of one source of text
    TOKENS_DIR/tokenizer_HASH/    a trained tokenizer, and its training data

HASH is of the origin (`origins.py`), so a changed source or tokenizer has a folder of its own, and no process
overwrites files that others use. Each manifest lists the shared files with their checksums, by paths relative to its
directory.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evenpack.data.prepare.directory import explain_write_failures, hold_lock, remove_leftovers
from evenpack.data.prepare.origins import Origin, origin_hash


@dataclass(frozen=True, kw_only=True)
class SharedTokens:
    """The `data.tokens_dir` of a run that is being prepared."""

    directory: Path
    needed_bytes: Callable[[], int | None]
    """Bytes still to be written, for the message of a full disk."""

    @contextmanager
    def held(self, name: str, origin: Origin) -> Iterator[Path]:
        """Locks the folder of this origin, and makes it if needed.

        Raises: DataError if another process works in it, or if it cannot be made or written.
        """
        place = place_of(self.directory, name, origin)
        with hold_lock(place, setting="data.tokens_dir"), explain_write_failures(place, self.needed_bytes):
            remove_leftovers(place)
            yield place


def place_of(tokens_dir: Path, name: str, origin: Origin) -> Path:
    """Returns the folder of the tokens of a source, or of `name`, with this origin."""
    return tokens_dir.absolute() / f"{name}_{origin_hash(origin)}"


def recorded_path(path: Path, directory: Path, shared: SharedTokens | None) -> str:
    """Returns a path for the manifest of `directory`: relative, or absolute for files that `prepare` did not write."""
    if path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    if shared is not None and path.is_relative_to(shared.directory):
        return Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix()
    return str(path)


def remedy(directory: Path, shared: Collection[Path] = ()) -> str:
    """Returns the remedy for damaged or missing files of a prepared set.

    Args:
        shared: those of them that are in a `data.tokens_dir`.
    """
    again = "Copy these files again from an intact copy, or remove"
    if not shared:
        return f"{again} {directory} and prepare again"
    folders = " and ".join(sorted({str(path.parent) for path in shared}))
    return (
        f"{again} {folders} (of data.tokens_dir) and {directory}, and prepare again: every set that shares these "
        "tokens is then complete, if the sources have not changed"
    )
