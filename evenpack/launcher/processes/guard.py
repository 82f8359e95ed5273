"""The thread in every rank that ends the rank when the run has ended, even if the main thread waits for something.

A rank that waits in a collective for one that has died, or whose launcher has ended, would wait for ever: NCCL
notices after minutes, and no signal handler runs while the main thread is in C.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

import psutil

from evenpack.engine.activity import doing, is_saving
from evenpack.launcher.processes.hangs import HangLimits, HangMonitor, Heartbeat, find_lost_rank
from evenpack.launcher.processes.identities import (
    LaunchToken,
    ProcessIdentity,
    RankPlace,
    is_deepspeed_launcher,
    parent_command,
)
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus
from evenpack.launcher.processes.stop import (
    StopFlag,
    StopRequest,
    read_stop_request,
    say,
    stopped_exit_code,
    write_stop_request,
)
from evenpack.worker_pool import is_resource_tracker, named_semaphores, remove_names

EXIT_ENDED_BY_GUARD = 128 + 9
"""Exit code of a rank that its guard ends."""

LOOK_SECONDS = 0.5
"""Seconds between two checks."""
_OWNER_SECONDS = 5.0
"""Seconds between two checks of which run owns the folder: nothing waits for the answer, and all ranks read one
file."""
_GRACE_SECONDS = 8.0
"""Seconds for the main thread to notice the failure of another rank itself."""
_SAVING_SECONDS = 20.0
"""Seconds in place of `_GRACE_SECONDS` while a thread writes a checkpoint, or the main one waits for it after an
error."""
_STARTING_SECONDS = 5.0
"""Seconds for a launcher to start all ranks of a machine."""
_LEAVING_SECONDS = 30.0
"""Seconds for the interpreter to end after the final status."""
_SIGNALLED_SECONDS = 6.0
"""Seconds from a signal to the end of a rank that waits for others to start. Launchers send it also when another rank
has ended, which its neighbours notice within this time."""
_STORE_SECONDS = 2.0
"""Seconds for other guards to find a stop request, before the store in which their ranks wait ends with rank 0."""
_EXIT_TIMEOUT_SECONDS = 5.0
"""Seconds for a file system to store the reason why the guard ends this rank."""


class Ancestors:
    """The launcher that started this rank, and the process that started it.

    If the parent has ended, no process waits for this rank any more. If only the grandparent has ended, as after a
    SIGTERM to `deepspeed`, the parent still waits: there is time to save. Other launchers are parents themselves, and
    what has started them (a shell, a job daemon) may end while the run goes on.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._watches_grandparent = is_deepspeed_launcher(parent_command())
        self._grandparent = self._find_grandparent()

    def reason_to_end(self) -> str | None:
        """Returns why a rank has to end whose parent has ended; None if it lives."""
        return f"the launcher (process {self._parent}) has ended" if os.getppid() != self._parent else None

    def grandparent_is_gone(self) -> bool:
        return self._watches_grandparent and self._find_grandparent() != self._grandparent

    def _find_grandparent(self) -> int | None:
        with suppress(psutil.Error):
            return int(psutil.Process(self._parent).ppid())
        return None


class Guard(threading.Thread):
    """Watches what has started this process, from the beginning on, and later the run: `watch`.

    A rank meets others, and waits for an output directory, before it can know where to write what.
    """

    def __init__(self, place: RankPlace, ancestors: Ancestors | None, stop: StopFlag) -> None:
        """`ancestors`: None for a rank that no launcher has started."""
        super().__init__(name="evenpack guard", daemon=True)
        self._place = place
        self._ancestors = ancestors
        self._stop = stop
        self._asked_at: float | None = None
        self._run: WatchedRun | None = None
        self._exit_code: int | None = None
        self._finished = threading.Event()

    def watch(self, run: "WatchedRun") -> None:
        """Watches a run from now on."""
        self._run = run

    def run(self) -> None:
        """Looks twice a second until `finish`, and then ensures that the process ends."""
        while not self._finished.wait(LOOK_SECONDS):
            self.look()
        time.sleep(_LEAVING_SECONDS)
        end_process(self._exit_code or 0)

    def look(self) -> None:
        """Checks everything once; ends this process if it has to."""
        if self._run is not None:
            self._run.keep_up()
        reason = self._reason()
        if reason is not None:
            _end_in_any_case()
            with suppress(OSError):
                say(f"rank {self._place.rank}: {reason}")
            if self._run is not None:
                self._run.record_end(reason)
            end_process(EXIT_ENDED_BY_GUARD)
        if self._is_stopped_early():
            _end_in_any_case()
            if self._run is not None:
                self._run.record_early_stop()
            if self._place.rank == 0:
                time.sleep(_STORE_SECONDS)
                say("stopped before the first step; run the same command again to continue")
            end_process(stopped_exit_code())

    def _is_stopped_early(self) -> bool:
        """Returns whether a stop has been requested of a rank that still waits for others: it has nothing to save.

        The others follow it, wherever they are: without it they cannot end a step.
        """
        if self._run is not None and self._run.is_over_before_first_step:
            return True
        if not self._stop.is_set() or doing.activity != "starting":
            return False
        self._asked_at = self._asked_at or time.monotonic()
        is_late = time.monotonic() - self._asked_at > _SIGNALLED_SECONDS
        if self._run is None:
            return is_late
        return self._run.failure is None and (is_late or self._run.is_asked_to_stop)

    def finish(self, exit_code: int) -> None:
        """Tells the guard that this rank has written its final status, so that failures of others no longer matter."""
        self._exit_code = exit_code
        self._finished.set()

    def _reason(self) -> str | None:
        """Returns why this process has to end now."""
        reason = None if self._ancestors is None else self._ancestors.reason_to_end()
        if reason is not None or self._run is None:
            return reason
        if self._ancestors is not None and self._ancestors.grandparent_is_gone():
            self._stop.set()
        return self._run.reason_to_end()


class WatchedRun:
    """The run of a rank: its `evenpack train`, its directory, and the other ranks."""

    def __init__(
        self,
        place: RankPlace,
        *,
        folder: RankFolder,
        token: LaunchToken | None,
        stop: StopFlag,
        heartbeat: Heartbeat,
        limits: HangLimits | None,
    ) -> None:
        self._stop = stop
        self._place = place
        self._folder = folder
        self._launcher = None if token is None else token.process_if_here()
        self._neighbours = Neighbours(heartbeat.status, place, folder)
        self._heartbeat = heartbeat
        self._hangs = None if limits is None else HangMonitor(folder, place.world_size, limits=limits, rank=place.rank)
        self._owner_due = time.monotonic()
        self._has_seen_own_run = place.rank == 0  # which has written it
        self.is_asked_to_stop = False
        """Whether all ranks are, by a request, and not this one alone by a signal."""
        self.is_over_before_first_step = False
        """Whether a rank has ended by that request before it had met the others."""
        self.failure: Failure | None = None
        """The first of the run, as far as this rank knows; kept, because a new run removes the file."""
        self._failure_seen: float | None = None
        self._announced = False

    def keep_up(self) -> None:
        """Says that this rank lives, and judges whether the run hangs."""
        self._folder.refresh()
        with suppress(OSError):
            self._heartbeat.keep_up()
        with suppress(OSError):
            if self._hangs is not None:
                self._hangs.check()

    def reason_to_end(self) -> str | None:
        """Returns why this rank has to end now."""
        if self._launcher is not None and not self._launcher.is_alive():
            return f"`evenpack train` (process {self._launcher.pid}) has ended"
        return self._another_run() or self._stop_request() or self._failure_of_others()

    def record_end(self, reason: str) -> None:
        """Writes why the guard ends this rank, which informs the machines that cannot see this failure."""
        with suppress(OSError):
            status = self._heartbeat.end("failed", exit_code=EXIT_ENDED_BY_GUARD, error=reason)
            if status.state == "failed":
                self._folder.claim_failure(Failure.of(status))

    def record_early_stop(self) -> None:
        """Stops the other ranks, too, and says how this one has ended."""
        with suppress(OSError):
            request = StopRequest(run_id=self._folder.run_id, at_once=False, before_first_step=True)
            write_stop_request(self._folder.output_dir, request)
            self._heartbeat.end("stopped", exit_code=stopped_exit_code())

    def first_failure(self) -> Failure | None:
        """Returns the rank that failed first, if any; this rank reports a neighbour that was killed."""
        if self.failure is None:
            self.failure = self._folder.read_failure()
        if self.failure is None:
            dead = self._neighbours.find_dead()
            if dead is not None:
                with suppress(OSError):
                    dead = self._folder.claim_failure(dead)
            self.failure = dead
        return self.failure

    def missing_rank(self) -> Failure | None:
        """Returns the rank that failed first, for a rank that has lost a connection; see `find_lost_rank`."""
        return find_lost_rank(self._folder, self._place.rank, self._place.world_size, self.first_failure)

    def _another_run(self) -> str | None:
        now = time.monotonic()
        if now < self._owner_due:
            return None
        self._owner_due = now + _OWNER_SECONDS
        owner = self._folder.owner_of(0)
        self._has_seen_own_run |= owner == self._folder.run_id  # before, rank 0 may not have started
        if self._has_seen_own_run and owner not in (self._folder.run_id, None):
            return f"another run has begun in {self._folder.output_dir}"
        return None

    def _stop_request(self) -> str | None:
        request = read_stop_request(self._folder.output_dir, self._folder.run_id)
        if request is not None:
            self._stop.set()
            self.is_asked_to_stop = True
            self.is_over_before_first_step = request.before_first_step
            self._announced = True  # by `evenpack train`, which wrote the request
        return "stopped at once" if request is not None and request.at_once else None

    def _failure_of_others(self) -> str | None:
        failure = self.first_failure()
        if failure is not None:
            now = time.monotonic()
            self._failure_seen = self._failure_seen or now
            writes = is_saving() or doing.activity == "waiting for a save"
            if now - self._failure_seen > (_SAVING_SECONDS if writes else _GRACE_SECONDS):
                self._neighbours.kill_hanging(failure.rank)
                return f"ended because {failure.describe()}"
        elif self._stop.is_set() and not self._announced and self._place.rank == 0:
            self._announced = True
            with suppress(OSError):
                say("asked to stop: saving at the end of this step")
        return None


class Neighbours:
    """The other ranks of this machine."""

    def __init__(self, status: RankStatus, place: RankPlace, folder: RankFolder) -> None:
        self._status = status
        self._place = place
        self._folder = folder
        self._processes: dict[int, ProcessIdentity] = {}
        self._gone: set[int] = set()
        self._starting_until = time.monotonic() + _STARTING_SECONDS

    def find_dead(self) -> Failure | None:
        """Returns a neighbour that has ended without a final status."""
        for rank in self._place.local_ranks():
            if rank == self._place.rank or rank in self._gone or self._is_elsewhere(rank):
                continue
            seen = self._identify(rank)
            if seen is None and self._launcher_lacks_children():
                return self._exit_without_message(rank)
            if seen is None or seen.is_alive():
                continue
            last = self._folder.read_status(rank)  # read after its end: its final status
            if last is None or last.state == "running":
                return self._exit_without_message(rank)
            if last.state == "failed":
                return Failure.of(last)
            self._gone.add(rank)
        return None

    def kill_hanging(self, blamed: int) -> None:
        """Kills a neighbour that blocks the run, and those that are stopped, with what they have started.

        They do not end themselves, and launchers wait half a minute for them.
        """
        for rank in self._place.local_ranks():
            identity, last = self._identify(rank), self._folder.read_status(rank)
            if rank == self._place.rank or identity is None or last is None or last.state != "running":
                continue
            with suppress(psutil.Error):
                process = psutil.Process(identity.pid)
                if identity.is_alive() and (rank == blamed or process.status() == psutil.STATUS_STOPPED):
                    kill_children(process)
                    process.kill()

    def _is_elsewhere(self, rank: int) -> bool:
        """Returns whether a rank is on another machine, as where `mpirun --map-by node` deals them out."""
        status = None if rank in self._processes else self._folder.read_status(rank)
        return status is not None and status.host != self._status.host

    def _identify(self, rank: int) -> ProcessIdentity | None:
        if rank not in self._processes:
            status = self._folder.read_status(rank)
            if status is not None and status.host == self._status.host:
                self._processes[rank] = status.process
        return self._processes.get(rank)

    def _launcher_lacks_children(self) -> bool:
        """Returns whether a rank ended before it could report that it had started."""
        if not self._place.launched or time.monotonic() < self._starting_until:
            return False
        alive = 0
        with suppress(psutil.Error):
            for child in psutil.Process(os.getppid()).children():
                alive += child.status() != psutil.STATUS_ZOMBIE
        return alive < self._place.local_world_size - len(self._gone)

    def _exit_without_message(self, rank: int) -> Failure:
        return Failure.seen(self._status.run_id, rank, self._status.host, None)


def _end_in_any_case() -> None:
    """Ends this process in a few seconds, should a file system or a terminal not take its last words."""
    last_resort = threading.Timer(_EXIT_TIMEOUT_SECONDS, os._exit, args=(EXIT_ENDED_BY_GUARD,))
    last_resort.daemon = True
    last_resort.start()


def kill_children(process: psutil.Process) -> None:
    """Kills what a process has started, but for resource trackers: they end by themselves, woken if they are stopped.

    Raises: psutil.Error if there is no such process.
    """
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            if is_resource_tracker(child.cmdline()):
                child.resume()
            else:
                child.kill()


def end_process(exit_code: int) -> NoReturn:
    """Ends this process and its children immediately, without waiting for threads, collectives or exit handlers."""
    with suppress(psutil.Error):
        kill_children(psutil.Process())
    remove_names(named_semaphores())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)
