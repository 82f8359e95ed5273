"""Notes which prepared directories a command opens, so that an unexplained error can be checked for damage in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_recorded: ContextVar[list[Path] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_directories() -> Iterator[list[Path]]:
    """Yields a list that holds each prepared directory once it has been opened within the block."""
    directories: list[Path] = []
    token = _recorded.set(directories)
    try:
        yield directories
    finally:
        _recorded.reset(token)


def record_opened(directory: Path) -> None:
    """Adds a directory to the list of the block in which this is called, if there is one."""
    directories = _recorded.get()
    if directories is not None and directory not in directories:
        directories.append(directory)
