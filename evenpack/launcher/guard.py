"""The thread in every rank that ends it when it is no longer wanted, whatever the main thread waits for.

A rank that waits in a collective for one that has died, or whose launcher is gone, would wait for ever: NCCL
notices after minutes, and a signal handler does not run while the main thread is in C. This thread ends it.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from evenpack.launcher.ranks import Failure, LaunchToken, ProcessIdentity, RankFolder, RankPlace, RankStatus
from evenpack.launcher.stop import StopFlag, read_stop_request

EXIT_KILLED = 128 + 9
"""Exit code of a rank that the guard ends."""

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 8.0
"""After another rank has failed, how long this one's main thread has to notice by itself."""


class Guard(threading.Thread):
    """Watches the launcher, the stop file and the other ranks of this machine."""

    def __init__(
        self,
        status: RankStatus,
        place: RankPlace,
        *,
        folder: RankFolder,
        token: LaunchToken | None,
        stop: StopFlag,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="evenpack guard", daemon=True)
        self._status = status
        self._place = place
        self._folder = folder
        self._stop_flag = stop
        self._say = say
        self._launcher = token.process if token is not None and token.host == status.host else None
        self._ancestors = _Ancestors() if place.launched else None
        self._neighbours: dict[int, ProcessIdentity] = {}
        self._ended_well: set[int] = set()
        self._failure_seen: float | None = None
        self._announced = False
        self._done = threading.Event()

    def run(self) -> None:
        """Looks twice a second until `finish`."""
        while not self._done.wait(_POLL_SECONDS):
            self._look_at_launcher()
            self._look_at_stop_file()
            self._look_at_ranks()

    def finish(self) -> None:
        """This rank has said its last word; what happens to others no longer matters to it."""
        self._done.set()

    def dead_neighbour(self) -> Failure | None:
        """A rank of this machine that has gone without a word."""
        for rank in self._place.local_ranks():
            if rank == self._place.rank or rank in self._ended_well:
                continue
            if rank not in self._neighbours:
                seen = self._folder.read_status(rank)
                if seen is None or seen.host != self._status.host:
                    continue
                self._neighbours[rank] = seen.process
            if self._neighbours[rank].is_alive():
                continue
            last = self._folder.read_status(rank)  # read after its end, so this is its last word
            if last is None or last.state == "running":
                return self._failure(rank, error=None, exit_code=None)
            if last.state == "failed":
                return self._failure(rank, error=last.error, exit_code=last.exit_code)
            self._ended_well.add(rank)
        return None

    def _look_at_launcher(self) -> None:
        if self._launcher is not None and not self._launcher.is_alive():
            self._end(f"`evenpack train` (process {self._launcher.pid}) is gone")
        if self._ancestors is not None:
            if self._ancestors.parent_is_gone():
                self._end(f"the launcher (process {self._ancestors.parent}) is gone")
            if self._ancestors.grandparent_is_gone():
                self._stop_flag.set()

    def _look_at_stop_file(self) -> None:
        request = read_stop_request(self._folder.path.parent, self._status.run_id)
        if request is not None:
            self._stop_flag.set()
            if request.at_once:
                self._end("stopped at once, nothing saved")

    def _look_at_ranks(self) -> None:
        failure = self._folder.read_failure()
        if failure is None:
            dead = self.dead_neighbour()
            if dead is not None:
                with suppress(OSError):
                    self._folder.claim_failure(dead)
                failure = dead
        if failure is not None and failure.rank != self._place.rank:
            now = time.monotonic()
            self._failure_seen = self._failure_seen or now
            if now - self._failure_seen > _GRACE_SECONDS:
                self._end(f"ended because {failure.describe()}", claim=False)
        elif self._stop_flag.is_set() and not self._announced and self._place.rank == 0:
            self._announced = True
            self._say("asked to stop: saving at the end of this step")

    def _failure(self, rank: int, *, error: str | None, exit_code: int | None) -> Failure:
        return Failure(
            run_id=self._status.run_id,
            rank=rank,
            host=self._status.host,
            error=error,
            exit_code=exit_code,
            at=time.time(),
        )

    def _end(self, reason: str, *, claim: bool = True) -> None:
        """Ends this process now: the main thread may be anywhere."""
        with suppress(OSError):
            self._say(f"rank {self._place.rank}: {reason}")
        with suppress(OSError):
            self._folder.write_status(self._status.ended("failed", exit_code=EXIT_KILLED, error=reason))
            if claim:  # ranks on machines that cannot see what this one saw learn it from here
                self._folder.claim_failure(self._failure(self._place.rank, error=reason, exit_code=EXIT_KILLED))
        with suppress(psutil.Error):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(EXIT_KILLED)


class _Ancestors:
    """The launcher that started this rank, and who started that.

    If the parent is gone, nobody waits for this rank any more. If only the grandparent is gone, which is what a
    SIGTERM to `deepspeed` leaves, the parent still waits: there is time to save.
    """

    def __init__(self) -> None:
        self.parent = os.getppid()
        self._grandparent = self._find_grandparent()

    def parent_is_gone(self) -> bool:
        return os.getppid() != self.parent

    def grandparent_is_gone(self) -> bool:
        return self._find_grandparent() != self._grandparent

    def _find_grandparent(self) -> int | None:
        with suppress(psutil.Error):
            return int(psutil.Process(self.parent).ppid())
        return None


def this_host() -> str:
    """How this machine calls itself."""
    return socket.gethostname()
