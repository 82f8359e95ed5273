"""Writing so that a kill at any moment leaves the old file or the new one, never half of it; reading lines of JSON.

The writer of token files (`evenpack.data.tokens.writer`) has temporary names of its own: a second process continues
the files of a first one, so these names are the same in each, and a journal records how much of the files is valid.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash

_READ_BYTES = 1 << 22
_MOST_LEVELS = 200
"""Levels of JSON: no file of ours has more than ten, and functions that call themselves for each level have a limit."""


def fsync_directory(directory: Path) -> None:
    """Makes renames and new names in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    temporary = _temporary(path)
    try:
        with temporary.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


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
