"""The rate at which the sequences of an order are read from a file that is not cached."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenpack.data.batches.read_ahead import ReadAhead
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sequences.view import StoredView
from evenpack.data.tokens.index import bin_path


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The first steps of an epoch, read once."""

    bytes_used: int
    """Bytes of the sequences."""
    bytes_from_disk: int
    """Bytes that the process read from disk."""
    bytes_per_second: float
    """Rate of the bytes used."""


def read_steps(source: PackedSource, *, packs_per_step: int, steps: int) -> Reading:
    """Reads the sequences of the first `steps` steps in their order, with the read-ahead of training."""
    view = source.view
    assert isinstance(view, StoredView | ShuffledView), "views of token files are the only ones there are"
    view.token_file.release_pages()  # mapped pages stay cached
    _forget(bin_path(view.token_file.prefix))
    ahead = ReadAhead([source])
    used = 0
    before, began = _read_from_disk(), time.perf_counter()
    for step in range(min(steps, source.plan.packs // packs_per_step)):
        positions = np.arange(step * packs_per_step, (step + 1) * packs_per_step)
        packs = select_packs([source], np.zeros(len(positions), dtype=np.int64), positions)
        ahead.follow(packs)
        used += view.gather(packs.sequence_ids).nbytes
    seconds = time.perf_counter() - began
    return Reading(
        bytes_used=used, bytes_from_disk=_read_from_disk() - before, bytes_per_second=used / max(seconds, 1e-9)
    )


def _forget(path: Path) -> None:
    """Asks the system to remove the file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_from_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])
