"""Arrays as .npy files that exist completely or not at all, with separate errors for a full disk."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from evenpack.errors import DataError
from evenpack.files import atomic_open, explained

_ZEROS = bytes(1 << 20)


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a `.npy` file atomically. Unlike `np.save`, it reports a full disk as such."""
    array = np.ascontiguousarray(array)
    with atomic_open(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


@contextmanager
def mapped_array(path: Path, count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yields a new array of `count` zeros, mapped from the future file `path`, to be filled in any order.

    The file is flushed and renamed when the block ends without an error; later assignments may be lost.

    Raises: OSError if the disk has too little space for the file.
    """
    with atomic_open(path, "w+b") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        begin = file.tell()
        _allocate(file, begin, count * dtype.itemsize)
        array = np.memmap(file, dtype=dtype, mode="r+", offset=begin, shape=(count,))
        yield array
        array.flush()


def open_array(path: Path) -> np.ndarray:
    """Maps a `.npy` file. Raises: DataError if it is missing or damaged."""
    with damage_named(path):
        return np.load(path, mmap_mode="r").view(np.ndarray)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turns what a missing, damaged or unreadable file raises into a DataError with its name."""
    try:
        with explained(path, DataError):
            yield
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is missing or damaged ({type(error).__name__}: {error}): `evenpack verify` lists all such "
            "files of prepared data; remove the directory, and prepare again or let the loader fill its cache again"
        ) from error


def _allocate(file: IO[Any], begin: int, size: int) -> None:
    """Allocates the file's blocks before it is mapped: a mapped write without disk space kills the process (SIGBUS)."""
    file.flush()
    if sys.platform == "darwin":  # has no posix_fallocate
        for _ in range(0, size, len(_ZEROS)):
            file.write(_ZEROS)
        file.truncate(begin + size)
    elif size:
        os.posix_fallocate(file.fileno(), begin, size)
