"""The prepared directory: one `prepare` at a time, and remains of killed ones."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenpack.data.manifest import MANIFEST, TOKENIZER_FOLDER, TRAINED_ON
from evenpack.errors import DataError

_LOCK = ".prepare.lock"
_OURS = frozenset({_LOCK, MANIFEST, TOKENIZER_FOLDER, TRAINED_ON, "sources"})


@contextmanager
def hold_lock(directory: Path, *, setting: str = "data.prepared_dir") -> Iterator[None]:
    """Locks `directory` against other processes; makes it if needed, and removes it again if left empty.

    `setting` is the key that names it. The lock ends with the process, however that ends. Raises: DataError if another
    process holds it, or if the directory cannot be made.
    """
    path = directory / _LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(f"{directory} cannot be prepared: {error}; choose another {setting}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _is_busy(directory) from error
        if not _is_at(path, descriptor):  # removed by the previous holder, between our opening and our locking
            raise _is_busy(directory)
        try:
            yield
        finally:
            with suppress(OSError):  # a name that stays locks nothing, and must not hide the error of the block
                if _is_at(path, descriptor):  # somebody may have removed it, and another process have made its own
                    path.unlink()
                directory.rmdir()
    finally:
        os.close(descriptor)


def refuse_foreign_files(directory: Path) -> None:
    """Checks the content. Raises: DataError if the directory holds anything that `prepare` would not write there."""
    foreign = sorted(path.name for path in directory.iterdir() if not _is_ours(path))
    if foreign:
        raise DataError(
            f"{directory} holds files that are not prepared data ('{foreign[0]}' first of {len(foreign)}): "
            "choose an empty or new data.prepared_dir"
        )


def remove_leftovers(directory: Path) -> None:
    """Removes the temporary files of killed writers; only for the holder of the lock."""
    for path in list(directory.rglob(".*.partial")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """Returns whether a path is one of `prepare`, a file where it writes one, or the temporary one of such a file."""
    if path.name.startswith(".") and path.name.endswith(".partial"):
        return any(path.name.startswith(f".{own}.") for own in _OURS)
    return path.name in _OURS and (path.is_file() or path.name not in (MANIFEST, TRAINED_ON))


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names the file that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_busy(directory: Path) -> DataError:
    return DataError(f"{directory} is being prepared by another process: wait until that has ended")
