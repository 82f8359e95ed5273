"""Pages of mapped arrays: which of them stay in memory, and what is read with them."""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def release_mapped_pages(array: np.ndarray) -> None:
    """Removes the pages from which `array` is mapped from this process's memory; does nothing without a mapping.

    They are read again from the page cache, or from disk, when they are needed.
    """
    mapping = _mapping(array)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


@contextmanager
def read_at_random(arrays: Iterable[np.ndarray]) -> Iterator[None]:
    """Lets the pages of mapped arrays be read alone within the block, without the megabytes around each of them."""
    mappings = [mapping for mapping in map(_mapping, arrays) if mapping is not None]
    for mapping in mappings:
        mapping.madvise(mmap.MADV_RANDOM)
    try:
        yield
    finally:
        for mapping in mappings:
            mapping.madvise(mmap.MADV_NORMAL)


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None
