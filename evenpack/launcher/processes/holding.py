"""The locks of an output directory: one run in it at a time, and one process that writes its files.

`evenpack train` holds `.lock`, or rank 0 where there is none; rank 0 holds `.writer` as well, as long as it lives.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from evenpack.engine.ownership import WRITER, owning
from evenpack.errors import RunError
from evenpack.files import explained
from evenpack.launcher.processes.identities import LaunchToken

_LOCK_SECONDS = 15.0
"""Seconds that a new run waits for the ranks of a killed one to notice and end."""

_LEASE_SECONDS = 120.0
"""The same for the lock of a rank on another machine: where that has lost power, a network file system keeps its locks
for a lease, 90 s in NFS 4."""


@contextmanager
def held_output_dir(output_dir: Path, *, patience_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Locks the output directory for one run; the kernel releases the lock however the process ends.

    Raises: RunError naming the process that has locked it, or if it cannot be written.
    """
    with _locked(output_dir / ".lock", patience_seconds):
        yield


@contextmanager
def held_as_writer(output_dir: Path, *, patience_seconds: float = _LEASE_SECONDS) -> Iterator[None]:
    """Makes this process, rank 0, the one that writes the run's files, until another one claims that.

    Arguments and errors are those of `held_output_dir`, whose lock `evenpack train` may hold instead of its ranks.
    """
    with _locked(output_dir / WRITER, patience_seconds) as claim, owning(output_dir, claim):
        yield


@contextmanager
def _locked(path: Path, patience_seconds: float) -> Iterator[bytes]:
    """Locks a file, which names its holder; yields what it says then, which nobody has written before."""
    with explained(path.parent, action="written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    started = time.monotonic()
    try:
        while not _try_to_lock(descriptor):
            if time.monotonic() - started > patience_seconds:
                raise RunError(
                    f"another run is writing into {path.parent}{_holder(path)}. Wait for its end, or give this one a "
                    "run.output_dir of its own"
                )
            time.sleep(0.2)
        claim = f"{LaunchToken.of_this_process()}\n".encode()
        with explained(path, action="written"):
            os.pwrite(descriptor, claim, 0)  # in place, for which a full disk has room
            os.truncate(descriptor, len(claim))
        yield claim
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: `ownership.require_owned` must do
    return True


def is_held(output_dir: Path) -> bool:
    """Whether a run is writing into the directory now; False where its file system has no locks."""
    with suppress(OSError), (output_dir / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _holder(path: Path) -> str:
    """Describes the process that has locked a file; empty while the file does not say it."""
    with suppress(OSError, ValueError):
        holder = LaunchToken.parse(path.read_text(encoding="utf-8").strip())
        here, stopped = holder.process_if_here(), ""
        with suppress(psutil.Error):
            if here is not None and psutil.Process(here.pid).status() == psutil.STATUS_STOPPED:
                stopped = f", which is stopped (kill -CONT {here.pid} wakes it, kill -9 ends it)"
        return f": process {holder.process.pid} on {holder.host}{stopped}"
    return ""
