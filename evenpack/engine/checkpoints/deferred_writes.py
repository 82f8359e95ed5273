"""DeepSpeed's save without its writing: the files are copied to memory, and written later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from evenpack.engine.checkpoints.host_copies import HostCopies


@dataclass(frozen=True, kw_only=True)
class DeferredWrite:
    """A file that is to be written."""

    path: Path
    write: Callable[[], Any]


@contextmanager
def deferring_writes(engine: Any, copies: HostCopies) -> Iterator[list[DeferredWrite]]:
    """Makes DeepSpeed copy each file's content instead of writing it; yields the list that grows as it does so."""
    writes: list[DeferredWrite] = []
    write = engine.checkpoint_engine.save
    copies.begin()

    def defer(state_dict: Any, path: str) -> None:
        writes.append(DeferredWrite(path=Path(path), write=partial(write, copies.copy(state_dict), path)))

    with mock.patch.object(engine.checkpoint_engine, "save", defer):
        yield writes
