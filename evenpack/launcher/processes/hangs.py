"""Finds the rank that holds up a run in which nothing goes on.

Ranks wait for each other in every step, so when one hangs all of them make no progress. The one that is to blame has
started no heartbeat at all, or its heartbeat has stopped, or it is behind all others in the step.
"""

import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import psutil

from evenpack.launcher.processes.heartbeat import Beat, beat_seconds, read_beat, stack_file
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankPlace
from evenpack.launcher.processes.roll_call import describe_silence

_SILENT_BEATS = 4
"""Heartbeats that must be missed before a rank counts as silent."""
_WARN_AT = 0.5
"""Part of the time-out after which a hang is a warning."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A run without progress, and the rank that holds it up."""

    rank: int
    host: str
    seconds: float
    """Time without progress."""
    message: str
    """What is known of the rank, as a clause for messages."""
    answers: bool = True
    """Whether its heartbeat goes on, so that it has written where it waits."""


@dataclass(kw_only=True)
class _Seen:
    beat: Beat
    beat_at: float
    """When this heartbeat was first seen, by the reader's own clock: clocks of machines differ."""
    moved_at: float
    """When the rank was first seen to do what it does."""


class HangFinder:
    """Judges heartbeats; reads neither files nor a clock."""

    def __init__(self, ranks: Collection[int], *, beat_every: float, now: float) -> None:
        self._ranks = ranks
        self._beat_every = beat_every
        self._seen: dict[int, _Seen] = {}
        self._began: float | None = None
        """When the first heartbeat of any rank was seen: before it, the launcher is still at work."""
        self._observed = now

    def observe(self, beats: Iterable[Beat], *, now: float) -> None:
        """Takes the newest heartbeats."""
        pause = now - self._observed
        if pause > _SILENT_BEATS * self._beat_every:
            self._forgive(pause)
        self._observed = now
        for beat in beats:
            self._began = now if self._began is None else self._began
            seen = self._seen.get(beat.rank)
            if seen is None or seen.beat.moves != beat.moves:
                self._seen[beat.rank] = _Seen(beat=beat, beat_at=now, moved_at=now)
            elif seen.beat.count != beat.count:
                seen.beat, seen.beat_at = beat, now

    def hang(self, *, ended: Collection[int], now: float) -> Hang | None:
        """Returns the rank that the run waits for, with the time that it has made no progress.

        None if no rank is left, or none has started. Ranks that have ended are never it.
        """
        ranks = [rank for rank in self._ranks if rank not in ended]
        seen = {rank: self._seen[rank] for rank in ranks if rank in self._seen}
        if not ranks or self._began is None:
            return None
        seconds = min([now - self._began, *(now - one.moved_at for one in seen.values())])
        absent = [rank for rank in ranks if rank not in seen]
        if absent:
            return Hang(rank=absent[0], host="an unknown machine", seconds=seconds, message="it has not started")
        silent = [rank for rank in seen if not self.answers(rank, now=now)]
        if silent:
            rank = min(silent, key=lambda rank: seen[rank].beat_at)
            hosts = {other: one.beat.host for other, one in seen.items()}
            what = _silence(seen[rank].beat, hosts, silent=silent)
        else:
            rank = min(ranks, key=lambda rank: seen[rank].beat.place)
            what = _behind_others([one.beat for one in seen.values()], seen[rank].beat)
        beat = seen[rank].beat
        message = f"{beat.describe()}{what and '; '}{what}"
        return Hang(rank=rank, host=beat.host, seconds=seconds, message=message, answers=not silent)

    def answers(self, rank: int, *, now: float) -> bool:
        """Returns whether the heartbeat of a rank goes on."""
        seen = self._seen.get(rank)
        return seen is not None and now - seen.beat_at <= _SILENT_BEATS * self._beat_every

    def _forgive(self, pause: float) -> None:
        """Leaves out a time in which the reader itself did not run, so that nothing was seen."""
        self._began = None if self._began is None else self._began + pause
        for seen in self._seen.values():
            seen.beat_at += pause
            seen.moved_at += pause


class HangMonitor:
    """Reads the heartbeats of a run, warns when it hangs, and records a failure when it has hung for too long.

    One that watches only some of the ranks may see only ranks that wait, whether the rank that they wait for hangs or
    works. So it leaves the judgement to those that watch all, as long as one of them answers.
    """

    def __init__(
        self,
        folder: RankFolder,
        ranks: Collection[int],
        *,
        timeout_seconds: float,
        warn: Callable[[str], None],
        leaves_it_to: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to watch `ranks`; `leaves_it_to`: those among them that watch all, if `ranks` are not all."""
        self._folder = folder
        self._ranks = ranks
        self._timeout = timeout_seconds
        self._warn = warn
        self._clock = clock
        self._every = beat_seconds(timeout_seconds)
        self._leaves_it_to = leaves_it_to
        self._finder = HangFinder(ranks, beat_every=self._every, now=clock())
        self._next = clock()
        self._warned: Hang | None = None

    @classmethod
    def of_rank(
        cls,
        place: RankPlace,
        folder: RankFolder,
        *,
        timeout_seconds: float,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> "HangMonitor":
        """Begins to watch as a rank does.

        The first and the last rank watch all ranks, so that each is watched by another one; others watch their machine
        and those two.
        """
        first_and_last = {0, place.world_size - 1}
        watches_all = place.rank in first_and_last
        return cls(
            folder,
            range(place.world_size) if watches_all else sorted({*place.local_ranks()} | first_and_last),
            timeout_seconds=timeout_seconds,
            warn=warn,
            leaves_it_to=() if watches_all else first_and_last,
            clock=clock,
        )

    def check(self) -> None:
        """Looks at the heartbeats, as often as they are written; the failure of a hang is in the folder then.

        Raises: OSError if it cannot be recorded.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._every
        found = (read_beat(self._folder.path, rank, run_id=self._folder.run_id) for rank in self._ranks)
        self._finder.observe(filter(None, found), now=now)
        if any(self._finder.answers(rank, now=now) for rank in self._leaves_it_to):
            return
        hang = self._finder.hang(ended=(), now=now)
        if self._is_long(hang):
            statuses = self._folder.read_statuses().values()
            hang = self._finder.hang(ended={one.rank for one in statuses if one.state != "running"}, now=now)
        self._report(hang if self._is_long(hang) else None)
        if hang is not None and hang.seconds > self._timeout:
            self._folder.claim_failure(_failure(hang, self._folder.run_id))

    def _is_long(self, hang: Hang | None) -> bool:
        return hang is not None and hang.seconds > _WARN_AT * self._timeout

    def _report(self, hang: Hang | None) -> None:
        """Warns once for each hang, and says when it is over."""
        if hang is not None and self._warned is None:
            self._warned = hang
            self._warn(
                f"no progress for {hang.seconds:.0f} s: rank {hang.rank} on {hang.host} ({hang.message}). The run "
                f"ends after {self._timeout:g} s of it (run.hang_timeout_seconds){self._stack_of(hang)}"
            )
        elif self._warned is not None and hang is None:
            self._warned = None
            if self._folder.read_failure() is None:  # a rank that wakes too late ends all the same
                self._warn("the run goes on")

    def _stack_of(self, hang: Hang) -> str:
        path = stack_file(self._folder.path, hang.rank)
        return f"; where it waits: {path}" if hang.answers and path.exists() else ""


def _failure(hang: Hang, run_id: str) -> Failure:
    return Failure(
        run_id=run_id,
        rank=hang.rank,
        host=hang.host,
        error=f"no progress for {hang.seconds:.0f} s ({hang.message})",
        exit_code=None,
        at=time.time(),
    )


def _behind_others(beats: Collection[Beat], slowest: Beat) -> str:
    """Returns how many ranks wait for the slowest; empty for a rank that is alone."""
    further = sum(beat.place > slowest.place for beat in beats)
    if further:
        return f"{further} of {len(beats)} ranks are further and wait for it"
    return "and so are all others" if len(beats) > 1 else ""


def _silence(beat: Beat, hosts: Mapping[int, str], *, silent: Collection[int]) -> str:
    if beat.host == socket.gethostname():
        return f"it does not answer: {_process_state(beat)}"
    return f"{describe_silence(beat.rank, hosts, silent=silent)} (process {beat.pid})"


def _process_state(beat: Beat) -> str:
    """Describes a process of this machine."""
    try:
        state = psutil.Process(beat.pid).status()
    except psutil.Error:
        return f"process {beat.pid} does not exist any more"
    if state == psutil.STATUS_STOPPED:
        return f"process {beat.pid} is stopped (SIGSTOP); SIGCONT makes it go on"
    return f"process {beat.pid} is {state}"
