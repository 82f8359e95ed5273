"""Pages of mapped arrays: which of them stay in memory, and what is read with them."""

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def release_mapped_pages(arrays: Iterable[np.ndarray]) -> None:
    """Removes the pages from which arrays are mapped from this process's memory; others stay as they are.

    They are read again from the page cache, or from disk, when they are needed.
    """
    _advise(arrays, mmap.MADV_DONTNEED)


def read_alone(arrays: Iterable[np.ndarray]) -> None:
    """Lets pages of mapped arrays be read alone from now on, without the megabytes around each of them."""
    _advise(arrays, mmap.MADV_RANDOM)


def exceeds_page_cache(arrays: Iterable[np.ndarray]) -> bool:
    """Returns whether arrays that are read in random order are better read page by page.

    The system reads 128 KiB or more around each page. That fills the page cache early where the arrays fit into it,
    and is read for nothing where the neighbours are gone before they are needed.
    """
    return sum(array.nbytes for array in arrays) > memory_bytes() // 2


def memory_bytes() -> int:
    """Returns the memory that this process and its page cache may have: the machine's, or its control group's."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits_of_group()])


def _limits_of_group(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields the memory limit of each control group that holds this process, by either version of them."""
    lines = groups.read_text().splitlines() if groups.exists() else []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if not controllers or "memory" in controllers.split(","):
            place = root / controllers / path.lstrip("/")
            for folder in (place, *place.parents):
                limit = folder / ("memory.limit_in_bytes" if controllers else "memory.max")
                if folder.is_relative_to(root) and limit.is_file():
                    text = limit.read_text().strip()
                    if text.isdigit():
                        yield int(text)


def _advise(arrays: Iterable[np.ndarray], advice: int) -> None:
    for array in arrays:
        owner: Any = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, mmap.mmap):
            owner.madvise(advice)
