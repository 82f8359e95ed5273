"""`data.tokens_dir`: what prepared sets share whose sources and tokenizer are the same, whatever their recipes.

    TOKENS_DIR/SOURCE_HASH/       tokens.{bin,idx}, document_hashes.npy and the journal of one source of text
    TOKENS_DIR/tokenizer_HASH/    a tokenizer that was trained, and what on

HASH is of the origin (`origins.py`), so a changed source or tokenizer has a folder of its own, and nobody overwrites
what others use. Each manifest lists the shared files with their checksums, by paths relative to its directory.
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
    """What is left to be written, for the message of a full disk."""

    @contextmanager
    def held(self, name: str, origin: Origin) -> Iterator[Path]:
        """The folder of what has this origin, made if need be, and no other process's for now.

        Raises: DataError if another process is at work in it, or if it cannot be made or written.
        """
        place = place_of(self.directory, name, origin)
        with hold_lock(place, setting="data.tokens_dir"), explain_write_failures(place, self.needed_bytes):
            remove_leftovers(place)
            yield place


def place_of(tokens_dir: Path, name: str, origin: Origin) -> Path:
    """Where the tokens of a source lie, or what `name` says, that have this origin."""
    return tokens_dir.absolute() / f"{name}_{origin_hash(origin)}"


def recorded_path(path: Path, directory: Path, shared: SharedTokens | None) -> str:
    """As the manifest of `directory` has it: relative to it, absolute where the file is none that `prepare` writes."""
    if path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    if shared is not None and path.is_relative_to(shared.directory):
        return Path(os.path.relpath(path.resolve(), directory.resolve())).as_posix()
    return str(path)


def remedy(directory: Path, shared: Collection[Path] = ()) -> str:
    """What to do about damaged or missing files of a prepared set.

    Args:
        shared: those of them that lie in a `data.tokens_dir`.
    """
    again = "Copy these files again from where they are whole, or remove"
    if not shared:
        return f"{again} {directory} and prepare again"
    folders = " and ".join(sorted({str(path.parent) for path in shared}))
    return (
        f"{again} {folders} (of data.tokens_dir) and {directory}, and prepare again: every set that shares these "
        "tokens is whole then, if the sources are what they were"
    )
