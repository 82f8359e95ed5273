"""Explains the death of a loader's process, which torch raises wherever the main thread is at that moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.errors import RunError

_TORCH_SAYS = "DataLoader worker (pid"


@contextmanager
def explained_loader_deaths() -> Iterator[None]:
    """Explains it within the block. Raises: RunError instead of torch's RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if _TORCH_SAYS not in first_line:
            raise
        raise RunError(
            f"a process that loads batches has died: {first_line.rstrip('. ')}. The kernel kills it when memory runs "
            "out, or someone did: look at `dmesg`, lower training.loader_workers, and start the same command again"
        ) from error
