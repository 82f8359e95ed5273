"""Paths to write to; writing that a kill at any moment leaves whole or undone; reading lines of JSON.

The writer of token files (`evenpack.data.tokens.writer`) has temporary names of its own: a second process continues
the files of a first one, so these names are the same in each, and a journal records how much of the files is valid.
"""

import glob
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import xxhash

from evenpack.errors import ConfigError

_READ_BYTES = 1 << 22
_ABANDONED_SECONDS = 7 * 24 * 3600
_MOST_LEVELS = 200
"""Levels of JSON: no file of ours has more than ten, and functions that call themselves for each level have a limit."""


def require_file(path: Path, suffix: str, *, option: str) -> None:
    """Checks that `option` can write a file there, and makes its folder. Raises: ConfigError."""
    is_folder = path.is_dir()
    if is_folder or path.suffix != suffix:
        example = path / f"result{suffix}" if is_folder else path.with_suffix(suffix)
        raise ConfigError(f"{option} writes a {suffix[1:].upper()} file: give a name like {example}, not {path}")
    require_folder(path.parent, option=option)


def require_folder(folder: Path, *, option: str) -> None:
    """Makes a folder into which `option` writes. Raises: ConfigError if there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}, where {option} would write, is not a folder and cannot be made: {error.strerror}; name another "
            "one"
        ) from error


def require_new_folder(folder: Path) -> None:
    """Checks that a folder which a user has named is new, or empty, and makes its parents. Raises: ConfigError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty directory; name a new one or remove it")
    if not folder.name:
        raise ConfigError(f"{folder} is the current directory, which cannot be replaced; name a new one")
    require_folder(folder.parent, option="this command")


def expand_user(path: str | Path) -> Path:
    """Returns a path with its `~` replaced; that of an unknown user stays, so that the path is reported as missing."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # `Path.expanduser` raises RuntimeError for such a user


def fsync_directory(directory: Path) -> None:
    """Makes renames and new names in `directory` survive a power failure."""
    fsync_file(directory)


def fsync_file(path: Path) -> None:
    """Flushes to disk what other libraries (numpy, DeepSpeed) wrote to `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_open(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path` that gets its name when it is complete and on disk."""
    with atomic_path(path) as temporary, temporary.open(mode) as file:
        yield file


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary name for libraries that open files themselves; they must close it. See `atomic_open`."""
    temporary = _temporary(path)
    try:
        yield temporary
        fsync_file(temporary)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Makes a new directory to fill, which gets the name `path` when everything in it is on disk.

    An earlier directory of this name is removed immediately before that: a kill in between leaves neither.
    """
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for part in sorted(temporary.rglob("*")):
            fsync_file(part)  # for a directory: its names
        fsync_directory(temporary)
        if path.is_dir():
            shutil.rmtree(path)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def unfinished_directory(path: Path) -> Iterator[Path]:
    """Makes a new folder beside `path` to fill and rename to it; several processes may do so at once.

    It is locked until then, and removed if it was not renamed. Those that killed processes left are removed by
    `remove_abandoned`.
    """
    folder, descriptor = _locked_folder(path)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Removes the unfinished folders beside `path` whose processes are gone.

    That is: nobody holds its lock, and it was made since this kernel started, whose locks are seen by all its
    processes, also in containers. One of another machine, or from before a restart, goes after a week without change.
    """
    import fcntl

    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = folder.name.split(".")[-3] == _kernel()
                unchanged = time.time() - max(part.stat().st_mtime for part in (folder, *folder.iterdir()))
                if is_at(folder, descriptor) and (is_ours or unchanged > _ABANDONED_SECONDS):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked_folder(path: Path) -> tuple[Path, int]:
    """Returns a new folder and the descriptor that locks it, where its file system has locks."""
    import fcntl

    while True:
        folder = path.with_name(f".{path.name}.{_kernel()}.{uuid.uuid4().hex}.unfinished")
        folder.mkdir(parents=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process took it for abandoned before it was locked
            continue
        with suppress(OSError):  # without locks nobody takes it for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_at(folder, descriptor):
            return folder, descriptor
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names the file or folder that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@cache
def _kernel() -> str:
    """Returns what distinguishes this start of this machine's kernel; `other` where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    return "other"


def write_text_once(path: Path, text: str) -> bool:
    """Writes `text` unless the file exists; of several writers, one succeeds. Returns whether it was this one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # writers may be on several machines
    write_text(temporary, text)
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)  # the file is complete when its name appears
            return True
        return False
    finally:
        temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8, atomically."""
    with atomic_open(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def parse_json_object(text: str | bytes, *, kind: str = "JSON line") -> dict[str, Any]:
    """Returns the object in a file of JSON, or in a line of JSON Lines; `kind` names it.

    Raises: ValueError with what was found instead: no JSON, no UTF-8, no object, or values nested too deeply.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a readable {kind}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > _MOST_LEVELS and _is_nested_beyond(value, _MOST_LEVELS):  # type: ignore[arg-type]
        raise ValueError(f"expected at most {_MOST_LEVELS} levels of objects and lists, found more")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file. Raises: OSError if it cannot be read, ValueError as `parse_json_object`."""
    return parse_json_object(path.read_bytes(), kind="JSON file")


def _is_nested_beyond(value: Any, levels: int) -> bool:
    """Returns whether a value holds lists and objects at more than `levels` levels, found without recursion."""
    inner = [value]
    for _ in range(levels):
        parts = (part.values() if isinstance(part, dict) else part for part in inner)
        inner = [child for part in parts for child in part if isinstance(child, dict | list)]
        if not inner:
            return False
    return True


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Returns the object in a small file that other processes write; None if it is missing or invalid."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def file_checksum(path: Path) -> str:
    """Returns the XXH3 (128 bits, hexadecimal) of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
