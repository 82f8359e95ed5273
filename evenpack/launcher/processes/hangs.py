"""Heartbeats of ranks, and the rank that a run waits for.

The training loop says what it begins and what it has done (`activity.doing`); the guard's thread writes it every few
seconds into the rank's file, `OUTPUT_DIR/ranks/rank_N.json`. So a rank that does not run at all (it was killed or
stopped, or its machine has gone) shows by a file that stays the same, and one whose main thread waits by a file that
goes on and says for how long the rank has not moved.

    training loop -> activity.doing -> guard: Heartbeat.keep_up -> file -> HangMonitor

Ranks wait for each other in every step, so when one hangs all of them make no progress. The one that is to blame has
never started, or its heartbeat has stopped, or it is behind all others in the step. Where a connection breaks first, a
rank is to blame that writes no further heartbeat (`find_lost_rank`).
"""

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from evenpack.engine.activity import START, Doing, doing
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, State

if TYPE_CHECKING:
    from evenpack.engine.config import RunSection

_BEAT_SECONDS, _SHORTEST_BEAT_SECONDS = 2.0, 0.2
_BEATS_PER_LIMIT = 20
_SILENT_BEATS = 5
"""Heartbeats that must be missed before a rank counts as silent."""
_STACK_AT = 0.4
"""Part of a limit without progress after which a rank writes its stacks."""
LOST_SECONDS = _SILENT_BEATS * _BEAT_SECONDS
"""Seconds in which every rank that is well writes a heartbeat, after another has lost a connection."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """How long nothing may move in a run."""

    step_seconds: float
    """In steps: run.hang_timeout_seconds."""
    start_seconds: float
    """Until the first step of every rank has ended, and in what no tick comes from: run.start_timeout_seconds; at
    least the limit of steps, as the start has a step in it."""

    @classmethod
    def of(cls, run: "RunSection") -> "HangLimits | None":
        """Returns the limits of a run; None if it may hang for ever."""
        if run.hang_timeout_seconds is None:
            return None
        start_seconds = max(run.start_timeout_seconds, run.hang_timeout_seconds)
        return cls(step_seconds=run.hang_timeout_seconds, start_seconds=start_seconds)

    def seconds(self, *, in_black_box: bool) -> float:
        """Returns the limit for now."""
        return self.start_seconds if in_black_box else self.step_seconds


def beat_seconds(limits: HangLimits | None) -> float:
    """Returns the seconds from one heartbeat to the next."""
    if limits is None:
        return _BEAT_SECONDS
    shortest = min(limits.step_seconds, limits.start_seconds)
    return min(max(shortest / _BEATS_PER_LIMIT, _SHORTEST_BEAT_SECONDS), _BEAT_SECONDS)


class Lateness:
    """Whether a thread that looks again and again was itself late, as on a machine that slept or in a paused container.

    What it has not seen it cannot judge. One that is as late at every look, as where the disk is slow, is not late: it
    would never see a hang.
    """

    def __init__(self, *, tolerance: float, now: float) -> None:
        self._tolerance = tolerance
        self._last = now
        self._gaps = 0.0, 0.0
        """Seconds between the last three looks."""

    def is_late(self, now: float) -> bool:
        """Returns it for a look at this time."""
        gap = now - self._last
        late = gap - min(self._gaps) > self._tolerance
        self._last, self._gaps = now, (self._gaps[1], gap)
        return late


class Heartbeat:
    """The one writer of this rank's file: the guard's thread says what the rank does, and whoever ends it how."""

    def __init__(
        self,
        folder: RankFolder,
        status: RankStatus,
        *,
        limits: HangLimits | None,
        doing: Doing = doing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without writing anything. `limits`: None if nobody judges whether the run hangs."""
        self.status = status
        self._folder = folder
        self._limits = limits
        self._doing = doing
        self._clock = clock
        self._lock = threading.Lock()
        self._every = beat_seconds(limits)
        self._due = self._moved_at = clock()
        self._lateness = Lateness(tolerance=_SILENT_BEATS * self._every, now=self._due)
        self._moves = -1
        self._stacks: int | None = None
        """The open file of stacks; None before the first heartbeat, or where it cannot be written."""

    def keep_up(self) -> None:
        """Writes the next heartbeat if it is due, or if a black box has begun or ended: the limit is another one then.

        Raises: OSError.
        """
        now = self._clock()
        if self._lateness.is_late(now):
            self._moved_at = now
        if now < self._due and self._doing.black_box == self.status.black_box:
            return
        self._due = now + self._every
        place, black_box = self._doing.place, self._doing.black_box  # first: what has left the start has just moved
        if self._moves != self._doing.moves:
            self._moves, self._moved_at = self._doing.moves, now
            self._arm_stacks()
        with self._lock:
            if self.status.state == "running":
                self.status = replace(
                    self.status,
                    beats=self.status.beats + 1,
                    place=place,
                    black_box=black_box,
                    still_seconds=now - self._moved_at,
                )
                self._folder.write_status(self.status)

    def end(self, state: State, *, exit_code: int, step: int | None = None, error: str | None = None) -> RankStatus:
        """Says how the rank has ended, unless it has said that before; returns what it has said. Raises: OSError."""
        with self._lock:
            if self.status.state == "running":
                self.status = self.status.ended(state, exit_code=exit_code, step=step, error=error)
                self._folder.write_status(self.status)
            return self.status

    def _arm_stacks(self) -> None:
        """Lets a thread in C write the stacks, also of a main thread in C, unless the rank moves again before."""
        if self._limits is None:
            return
        with suppress(OSError):
            if self._stacks is None:
                path = self._folder.stack_file(self.status.rank)
                self._stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
            faulthandler.cancel_dump_traceback_later()
            if os.fstat(self._stacks).st_size:
                os.ftruncate(self._stacks, 0)  # a stack from before would mislead in the next hang
            limit = self._limits.seconds(in_black_box=self._doing.black_box is not None)
            faulthandler.dump_traceback_later(_STACK_AT * limit, file=self._stacks)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A run without progress, and the rank that holds it up."""

    rank: int
    host: str
    seconds: float
    """Time without progress."""
    message: str
    """What is known of the rank, as a clause for messages."""
    in_black_box: bool
    """Whether a rank has not started, or is in what does not tick: the limit of the start holds."""


class HangMonitor:
    """Reads the files of a run's ranks, and records a failure when the run has hung for too long.

    Clocks of machines are not compared: a rank says by its own for how long it has not moved, and the reader's says
    for how long the file has not changed.
    """

    def __init__(
        self,
        folder: RankFolder,
        ranks: int,
        *,
        limits: HangLimits,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to watch a run of `ranks`.

        `rank`: the one that watches. It leaves the judgement to the first that answers, so ranks read few files.
        """
        self._folder = folder
        self._ranks = ranks
        self._rank = rank
        self._limits = limits
        self._clock = clock
        self._every = beat_seconds(limits)
        self._silence = _SILENT_BEATS * self._every
        self._next = clock()
        self._lateness = Lateness(tolerance=self._silence, now=self._next)
        self._seen: dict[int, tuple[RankStatus, float]] = {}
        """The newest status of each rank, and when it was first seen."""

    def check(self) -> None:
        """Looks at the ranks, as often as they write; the failure of a hang is in the folder then.

        Raises: OSError if it cannot be recorded.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._every
        if self._lateness.is_late(now):
            self._seen.clear()
        for rank in range(self._ranks):
            status = self._folder.read_status(rank)
            if status is not None and (rank not in self._seen or self._seen[rank][0] != status):
                self._seen[rank] = status, now
            if rank < self._rank and rank in self._seen and self._answers(rank, now):
                return
        hang = self.hang(now)
        if hang is None or hang.seconds <= (limit := self._limits.seconds(in_black_box=hang.in_black_box)):
            return
        key = "run.start_timeout_seconds" if limit > self._limits.step_seconds else "run.hang_timeout_seconds"
        stacks = self._folder.stack_file(hang.rank)
        where = f"; where it waits: {stacks}" if stacks.exists() and stacks.stat().st_size else ""
        error = f"no progress for {hang.seconds:.0f} s ({hang.message}), which {key} limits to {limit:g} s{where}"
        self._folder.claim_failure(Failure.seen(self._folder.run_id, hang.rank, hang.host, error))

    def hang(self, now: float) -> Hang | None:
        """Returns the rank that the run waits for, with the time that it has made no progress.

        None if no rank is left, or none has started. Ranks that have ended are never it.
        """
        running = [one for one, _ in self._seen.values() if one.state == "running"]
        absent = [rank for rank in range(self._ranks) if rank not in self._seen]
        if not self._seen or not (running or absent):
            return None
        answering = [one for one in running if self._answers(one.rank, now)]
        seconds = min(self._still(rank, now) for rank in ([one.rank for one in answering or running] or self._seen))
        if absent:
            host, message = "an unknown machine", "it has not started"
            return Hang(rank=absent[0], host=host, seconds=seconds, message=message, in_black_box=True)
        silent = [one for one in running if one not in answering]
        if silent:
            blamed = min(silent, key=lambda one: self._seen[one.rank][1])
            what = _silence(blamed, running, silent=[one.rank for one in silent])
        else:
            blamed = min(running, key=RankStatus.order)
            what = _behind_others(running, blamed)
        return Hang(
            rank=blamed.rank,
            host=blamed.host,
            seconds=seconds,
            message=f"{blamed.describe()}{what and '; '}{what}",
            in_black_box=_any_in_black_box(running),
        )

    def _answers(self, rank: int, now: float) -> bool:
        status, at = self._seen[rank]
        return status.state == "running" and now - at <= self._silence

    def _still(self, rank: int, now: float) -> float:
        """Returns for how long a rank has not moved."""
        status, at = self._seen[rank]
        return status.still_seconds + now - at


def find_lost_rank(
    folder: RankFolder, rank: int, world_size: int, first_failure: Callable[[], Failure | None]
) -> Failure | None:
    """Returns who has failed in a run in which `rank` has lost a connection.

    That is the failure that another process has recorded, or that of the first rank that writes no further heartbeat,
    which is recorded now; None if all others go on, so that only the network has failed.
    """
    folder.refresh()
    before = folder.read_statuses()
    deadline = time.monotonic() + LOST_SECONDS
    while (failure := first_failure()) is None and (silent := _silent_since(before, folder, world_size, seen_by=rank)):
        if time.monotonic() > deadline:
            with suppress(OSError):
                return folder.claim_failure(_lost(folder, silent))
            return None
        time.sleep(_POLL_SECONDS)
    if failure is None:  # a rank that could not record its failure, as on a full disk, has a status all the same
        failed = [one for one in folder.read_statuses().values() if one.state == "failed" and one.rank != rank]
        failure = Failure.of(failed[0]) if failed else None
    return failure


def _silent_since(before: Mapping[int, RankStatus], folder: RankFolder, world_size: int, *, seen_by: int) -> list[int]:
    """Returns the ranks that have not started, or run and have written no heartbeat since `before`."""
    folder.refresh()
    now = folder.read_statuses()
    well = {rank for rank, status in now.items() if status.state != "running" or status != before.get(rank)}
    return [rank for rank in range(world_size) if rank != seen_by and rank not in well]


def _lost(folder: RankFolder, silent: Collection[int]) -> Failure:
    statuses = folder.read_statuses()
    started = [rank for rank in silent if rank in statuses]
    if not started:
        error = "it has not started, or its machine does not see run.output_dir"
        return Failure.seen(folder.run_id, min(silent), "an unknown machine", error)
    blamed = statuses[min(started)]
    error = f"others have lost their connection to it; {_silence(blamed, statuses.values(), silent=silent)}"
    return Failure.seen(folder.run_id, blamed.rank, blamed.host, error)


def _any_in_black_box(running: Collection[RankStatus]) -> bool:
    """Returns whether a rank is in what does not tick.

    The last heartbeat of a silent rank may be from before the end of it. Ranks end each step together: nobody is in
    the start when another has left it, nor in any when another is two steps further.
    """
    furthest = max(one.place[0] for one in running)
    all_start = all(one.black_box == START for one in running)
    return any(
        all_start if one.black_box == START else one.black_box is not None and one.place[0] >= furthest - 1
        for one in running
    )


def _behind_others(running: Collection[RankStatus], slowest: RankStatus) -> str:
    """Returns how many ranks wait for the slowest; empty for a rank that is alone."""
    further = sum(one.order() > slowest.order() for one in running)
    if further:
        return f"{further} of {len(running)} ranks are further and wait for it"
    return "and so are all others" if len(running) > 1 else ""


def _silence(blamed: RankStatus, statuses: Collection[RankStatus], *, silent: Collection[int]) -> str:
    """Describes a rank whose heartbeat has stopped, by its process if that is here, else by the ranks beside it."""
    pid = blamed.process.pid
    if blamed.host == socket.gethostname():
        return f"it does not answer: {_process_state(pid)}"
    here = sorted(one.rank for one in statuses if one.host == blamed.host)
    if not set(here) <= set(silent):
        what = "it does not answer, though its machine does: it was killed or stopped"
    elif len(here) == 1:
        what = "it does not answer: it was killed or stopped, or its machine is down or not reachable"
    else:
        what = f"none of the ranks {here[0]} to {here[-1]} of its machine answers: the machine is down or not reachable"
    return f"{what} (process {pid})"


def _process_state(pid: int) -> str:
    """Describes a process of this machine."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return f"process {pid} does not exist any more"
    if state == psutil.STATUS_STOPPED:
        return f"process {pid} is stopped (SIGSTOP); SIGCONT makes it go on"
    return f"process {pid} is {state}"
