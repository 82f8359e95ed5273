"""Arrays as .npy files that are there whole or not at all, and that tell a full disk from other trouble."""

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from evenpack.files import atomic_open

_ZEROS = bytes(1 << 20)


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a `.npy` file atomically. Unlike `np.save`, it reports a full disk as what it is."""
    array = np.ascontiguousarray(array)
    with atomic_open(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


@contextmanager
def mapped_array(path: Path, count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """A new array of `count` zeros, at least one, to be filled in any order: mapped from the file that will be `path`.

    The file takes its name, flushed, where the block ends without an error; what is assigned later is not sure to last.

    Raises: OSError if the disk has no room for the whole of it.
    """
    with atomic_open(path, "w+b") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        begin = file.tell()
        _allocate(file, begin, count * dtype.itemsize)
        array = np.memmap(file, dtype=dtype, mode="r+", offset=begin, shape=(count,))
        yield array
        array.flush()


def release_mapped_pages(array: np.ndarray) -> None:
    """Takes the pages of the file that `array` is mapped from out of this process' memory; nothing where there is none.

    They are read again from the page cache, or from disk, where they are needed.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def _allocate(file: IO[Any], begin: int, size: int) -> None:
    """Gives the file its blocks before it is mapped: a mapped write that finds no room kills the process (SIGBUS)."""
    file.flush()
    if sys.platform == "darwin":  # has no posix_fallocate
        for _ in range(0, size, len(_ZEROS)):
            file.write(_ZEROS)
        file.truncate(begin + size)
    else:
        os.posix_fallocate(file.fileno(), begin, size)
