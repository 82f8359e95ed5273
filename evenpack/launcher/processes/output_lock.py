"""The lock on an output directory: one run at a time writes into it."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenpack.errors import RunError

_LOCK_SECONDS = 15.0
"""Seconds that a new run waits for the ranks of a killed one to notice and end."""


@contextmanager
def held_output_dir(output_dir: Path, *, patience_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Locks the output directory for one run; the kernel releases the lock however the process ends.

    Raises: RunError if another run has locked it, or it cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / ".lock").open("a")
    except OSError as error:
        raise RunError(f"run.output_dir {output_dir} cannot be written: {error.strerror}") from error
    deadline = time.monotonic() + patience_seconds
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"another run is writing into {output_dir}: wait for its end, or give this one a "
                        "run.output_dir of its own"
                    ) from None
            except OSError:
                break  # a file system without locks: other runs cannot be detected
            time.sleep(0.2)
        yield


def is_held(output_dir: Path) -> bool:
    """Whether a run is writing into the directory now; False where its file system has no locks."""
    with suppress(OSError), (output_dir / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
