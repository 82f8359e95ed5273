"""Paths to write to; writing that a kill at any moment leaves whole or undone; reading lines of JSON.

The writer of token files (`evenpack.data.tokens.writer`) has temporary names of its own: a second process continues
the files of a first one, so these names are the same in each, and a journal records how much of the files is valid.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard

import xxhash

from evenpack.errors import ConfigError, EvenpackError, RunError

_MOST_CHARACTERS = 1000
"""Characters of a path in a message: one may be too long for any file."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk, a quota or a limit that has no more room."""

_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE})
_OF_THE_SYSTEM = {
    *(*FULL, *_FORBIDDEN, *_TOO_MANY, errno.ENOMEM, errno.ENOLCK, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR),
    *(errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)),
}
"""Errors that no code of ours causes: a disk, a quota, a limit, permissions, a path."""


def is_of_the_system(error: BaseException) -> TypeGuard[OSError]:
    """Returns whether an error is one of disks, quotas, limits and permissions, which a user can remove."""
    return isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM


def system_error(
    error: OSError,
    path: Path | None = None,
    *,
    action: str = "read or written",
    place: str = "",
    then: str = "run the same command again",
) -> str:
    """Returns the message for an error of the system: the file, the reason, and what removes it.

    The file is the one that the error names if it is in the folder `path`, and else `path`: the error may name a
    temporary file, or none. `place` follows what cannot be done, as in "cannot be read from byte 7 on".
    """
    is_nearer = path is None or str(error.filename).startswith(f"{path}{os.sep}")
    if error.errno in FULL and action == "read or written":
        action = "written"
    named = str((error.filename if is_nearer else path) or "a file")
    named = named if len(named) <= _MOST_CHARACTERS else f"{named[:_MOST_CHARACTERS]} ..."
    return f"{named} cannot be {action}{place}: {error.strerror or error}; {_remedy(error.errno, action)}, and {then}"


def _remedy(number: int | None, action: str) -> str:
    if number in FULL:
        return "make room on its disk"
    if number in _FORBIDDEN:
        return "give this user access to it"
    if number in _TOO_MANY:
        import resource  # which Windows lacks

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process may open {soft:,} files at once: raise the limit (`ulimit -n`, at most {hard:,})"
    others = {
        errno.EISDIR: "move it away, a file is expected there",
        errno.EEXIST: "move it away, or name another place",
        errno.ENOTEMPTY: "move it away, or name another place",
        errno.ENOENT: "put it back, or give another path",
        errno.ENOTDIR: "put it back, or give another path",
        errno.ENAMETOOLONG: "a name in a path has at most 255 bytes: give another",
    }
    intact = "the file may be intact: " if action == "read" else ""
    return others.get(number or 0, f"{intact}look at its disk or mount")


@contextmanager
def explained(
    path: Path,
    kind: type[EvenpackError] = RunError,
    *,
    action: str = "read",
    place: str = "",
    then: str = "run the same command again",
    missing: bool = False,
) -> Iterator[None]:
    """Makes an error of the system while a file is read or written an error of `kind`, see `system_error`.

    A reader's error that says nothing of the system passes, and so does one that a file is missing unless `missing`:
    then the file's content, or a copy of it, is to blame.
    """
    try:
        yield
    except OSError as error:
        if action == "read" and (error.errno is None or (is_missing(error) and not missing)):
            raise
        raise kind(system_error(error, path, action=action, place=place, then=then)) from error


def is_missing(error: OSError) -> bool:
    """Returns whether an error says that there is no such file."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR)


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


def expand_users(value: Any) -> Any:
    """Returns an argument, or a list of them, with the `~` that begins a text or path replaced as by `expand_user`."""
    if isinstance(value, list | tuple):
        return type(value)(map(expand_users, value))
    if isinstance(value, str | Path) and str(value).startswith("~"):
        return type(value)(expand_user(value))
    return value


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
def atomic_open(path: Path, mode: str = "wb", *, check: Callable[[], None] | None = None) -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path` that gets its name when it is complete and on disk; see `atomic_path`."""
    with atomic_path(path, check=check) as temporary, temporary.open(mode) as file:
        yield file


@contextmanager
def atomic_path(path: Path, *, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a temporary name for libraries that open files themselves; they must close it.

    `check` is called when the file is on disk, immediately before it gets its name, which an error of it prevents.
    """
    temporary = _temporary(path)
    try:
        yield temporary
        fsync_file(temporary)
        if check is not None:
            check()
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Makes a new directory to fill, which gets the name `path` when everything in it is on disk.

    With `replaces`, an earlier directory of this name is removed immediately before that: a kill in between leaves
    neither. Otherwise there may be an empty one; what somebody has put there meanwhile stays, and it is an OSError.
    """
    temporary = _temporary(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for part in sorted(temporary.rglob("*")):
            fsync_file(part)  # for a directory: its names
        fsync_directory(temporary)
        if replaces:
            shutil.rmtree(path, ignore_errors=True)
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text_once(path: Path, text: str) -> bool:
    """Writes `text` unless the file exists; of several writers, one succeeds. Returns whether it was this one."""
    temporary = _temporary(path)
    write_text(temporary, text)
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)  # the file is complete when its name appears
            return True
        return False
    finally:
        temporary.unlink()


def write_text(path: Path, text: str, *, check: Callable[[], None] | None = None) -> None:
    """Writes `text` as UTF-8, atomically; `check` as in `atomic_path`."""
    with atomic_open(path, check=check) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any, *, check: Callable[[], None] | None = None) -> None:
    """Writes `value` as indented JSON, atomically; `check` as in `atomic_path`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n", check=check)


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
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file. Raises: OSError if it cannot be read, ValueError as `parse_json_object`."""
    return parse_json_object(path.read_bytes(), kind="JSON file")


def read_kept(path: Path) -> dict[str, Any] | None:
    """Returns the object in a file of results; None if it is missing or invalid. Raises: RunError as `explained`."""
    with explained(path):
        try:
            return read_json(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Returns the object in a small file that other processes write, and that is looked at again; None without one."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _temporary(path: Path) -> Path:
    """Returns a name beside `path` that no other writer has, also none of another machine or container."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def hash_of_json(content: Any) -> str:
    """Returns the XXH3 (128 bits, hexadecimal) of JSON values, independent of the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def file_checksum(path: Path) -> str:
    """Returns the XXH3 (128 bits, hexadecimal) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
