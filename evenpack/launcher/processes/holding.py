"""The locks of an output directory: one run in it at a time, and one process that writes its files.

`evenpack train` holds `.lock`, or rank 0 where there is none; rank 0 holds `.writer` as well, as long as it lives.
"""

import fcntl
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from evenpack.engine.ownership import WRITER, owning
from evenpack.errors import RunError
from evenpack.files import explained, read_json_object
from evenpack.launcher.processes.identities import ProcessIdentity, this_machine
from evenpack.launcher.processes.stop import say

_LOCK_SECONDS = 15.0
"""Seconds that a new run waits for the ranks of a killed one to notice and end."""

_LEASE_SECONDS = 120.0
"""The same for the lock of a rank on another machine: where that has lost power, a network file system keeps its locks
for a lease, 90 s in NFS 4."""

_ORPHAN_SECONDS = 3.0
"""Seconds in which a rank whose launcher is gone ends by itself, unless it is stopped."""


@contextmanager
def held_output_dir(
    output_dir: Path, *, patience_seconds: float = _LOCK_SECONDS, needs: Sequence[ProcessIdentity] = ()
) -> Iterator[None]:
    """Locks the output directory for one run; the kernel releases the lock however the process ends.

    `needs`: processes without which this one ends by itself. A later start kills it if one of them has ended and it has
    not: it is stopped.

    Raises: RunError naming the process that has locked it, or if it cannot be written.
    """
    with _locked(output_dir / ".lock", patience_seconds, needs):
        yield


@contextmanager
def held_as_writer(
    output_dir: Path, *, patience_seconds: float = _LEASE_SECONDS, needs: Sequence[ProcessIdentity] = ()
) -> Iterator[None]:
    """Makes this process, rank 0, the one that writes the run's files, until another one claims that.

    Arguments and errors are those of `held_output_dir`, whose lock `evenpack train` may hold instead of its ranks.
    """
    with _locked(output_dir / WRITER, patience_seconds, needs) as claim, owning(output_dir, claim):
        yield


@contextmanager
def _locked(path: Path, patience_seconds: float, needs: Sequence[ProcessIdentity]) -> Iterator[bytes]:
    """Locks a file, which names its holder; yields what it says then, which nobody has written before."""
    with explained(path.parent, action="written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    started = time.monotonic()
    try:
        while not _try_to_lock(descriptor):
            holder, waited = _Holder.read(path), time.monotonic() - started
            if holder is not None and waited > _ORPHAN_SECONDS:
                holder.end_orphan(path)
            if waited > patience_seconds:
                raise RunError(
                    f"another run is writing into {path.parent}{'' if holder is None else f': {holder}'}. Wait for its "
                    "end, or give this one a run.output_dir of its own"
                )
            time.sleep(0.2)
        claim = _Holder.this_process(needs).to_bytes()
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


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """The process that has locked a file, as the file names it."""

    id: str
    """Of this locking."""
    host: str
    machine: str
    process: ProcessIdentity
    needs: tuple[ProcessIdentity, ...]

    @classmethod
    def this_process(cls, needs: Sequence[ProcessIdentity]) -> "_Holder":
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=this_machine(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
            needs=tuple(needs),
        )

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> "_Holder | None":
        """Returns the holder; None while it has not said who it is."""
        values = read_json_object(path) or {}
        with suppress(KeyError, TypeError):
            process, *needs = (ProcessIdentity(**one) for one in (values["process"], *values["needs"]))
            return cls(**{**values, "process": process, "needs": tuple(needs)})
        return None

    def __str__(self) -> str:
        stopped = ""
        with suppress(psutil.Error):
            if self._is_here and psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED:
                stopped = f", which is stopped (kill -CONT {self.process.pid} wakes it, kill -9 ends it)"
        return f"process {self.process.pid} on {self.host}{stopped}"

    @property
    def _is_here(self) -> bool:
        return (self.host, self.machine) == (socket.gethostname(), this_machine())

    def end_orphan(self, path: Path) -> None:
        """Kills a rank of this machine that should have ended with its launcher, and still has the file open."""
        if not self._is_here or all(needed.is_alive() for needed in self.needs) or not self.process.is_alive():
            return
        with suppress(psutil.Error, OSError):
            if any(Path(file.path).samefile(path) for file in psutil.Process(self.process.pid).open_files()):
                say(f"ending process {self.process.pid}, a rank of an earlier start that has outlived its launcher")
                os.kill(self.process.pid, signal.SIGKILL)
