"""Reads blocks before they are drawn from, each from front to back, so that no batch waits for a slow disk."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.order.forms import FormedStream
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.sequences.joined import JoinedView
from evenpack.data.sequences.view import LocatedSequences
from evenpack.data.tokens.file import bin_path

_READ_BYTES = 1 << 22
_BLOCKS_AHEAD = 2
"""Blocks to hold: the one that is drawn from, and the next one."""

ByteRange = tuple[Path, int, int]


@dataclass
class _Followed:
    """A source that has blocks."""

    index: int
    source: PackedSource
    asked: list[tuple[LocatedSequences, int, int]] = field(default_factory=list)
    """The ranges of sequences that were requested last."""

    def ahead(self, position: int) -> list[tuple[LocatedSequences, int, int]]:
        """Returns the sequences of the block at a position and of the next ones; none if the source has no blocks."""
        view, plan = self.source.view, self.source.plan
        while isinstance(plan, FormedStream) and isinstance(view, JoinedView):
            is_own, position = plan.place(position)
            view, plan = (view.after, plan.after) if is_own else (view.before, plan.before)
        if not (isinstance(plan, BlockedPlan) and isinstance(view, LocatedSequences)):
            return []
        return [(view, *one) for one in plan.sequences_ahead(position, _BLOCKS_AHEAD)]


class ReadAhead:
    """Reads the coming blocks of all sources that have blocks into the page cache, in a thread that it starts."""

    def __init__(self, sources: Sequence[PackedSource]) -> None:
        followed = [_Followed(index=index, source=source) for index, source in enumerate(sources)]
        self._sources = [source for source in followed if source.ahead(0)]
        self._queue: SimpleQueue[ByteRange] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def follow(self, packs: PackSelection) -> None:
        """Requests the blocks of these packs and the next ones, unless already requested; returns at once."""
        for source in self._sources:
            positions = packs.stream_positions[packs.sources == source.index]
            if not len(positions):
                continue
            ahead = source.ahead(int(positions.max()))
            new = [one for one in ahead if one not in source.asked]
            if new:
                new[0][0].token_file.release_pages()  # the pages of the previous block
                source.asked = ahead
                for wanted in new:
                    self._ask(byte_range(*wanted))

    def _ask(self, wanted: ByteRange) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_read_all, args=(self._queue,), name="read-ahead", daemon=True)
            self._thread.start()
        self._queue.put(wanted)


def byte_range(view: LocatedSequences, first: int, stop: int) -> ByteRange:
    """Returns the byte range of the sequences `first` to `stop` in the token file."""
    starts, lengths = view.locate(np.array([first, stop - 1]))
    size = view.token_file.dtype.itemsize
    return bin_path(view.token_file.prefix), int(starts[0]) * size, int(starts[1] + lengths[1]) * size


def _read_all(queue: "SimpleQueue[ByteRange]") -> None:
    buffer = bytearray(_READ_BYTES)
    while True:
        # The reader that needs these bytes meets the same error where it can report it.
        with suppress(OSError):
            _read(*queue.get(), buffer)


def _read(path: Path, start: int, stop: int, buffer: bytearray) -> None:
    """Reads the range and discards it: the pages stay in the system's cache as long as there is memory for them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while start < stop:
            read = os.preadv(descriptor, [memoryview(buffer)[: stop - start]], start)
            if not read:
                return
            start += read
    finally:
        os.close(descriptor)
