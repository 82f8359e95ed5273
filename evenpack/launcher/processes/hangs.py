"""Heartbeats of ranks, and the rank that blocks a run without progress.

The training loop reports what it begins to do; the guard's thread writes it into `OUTPUT_DIR/ranks/heartbeat_N`. So a
rank that does not run at all (it is stopped, or its machine has gone) shows by a heartbeat that stays the same, and a
rank whose training waits for something shows by a heartbeat that goes on and says the same. Where a rank works without
the others (`own_work`), the processor time and the bytes of its processes show whether it moves.

    training loop -> activity.doing -> guard: Heartbeat.keep_up -> file -> read_beat -> HangMonitor

Ranks wait for each other in every step, so when one hangs all of them make no progress. The one that is to blame has
started no heartbeat at all, or its heartbeat has stopped, or it is behind all others in the step.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from evenpack.engine.activity import ACTIVITIES, Activity, Doing, current_own_work, doing
from evenpack.files import write_text
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankPlace, describe_silence

_BEATS_PER_TIMEOUT = 20
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.2, 30.0
_STACK_AT = 0.4
"""Part of the time-out without progress after which a rank writes its stack: before any warning."""
_FILE_BYTES = 512
"""Size of the file, padded with spaces: it is written in place, which a full disk does not prevent."""

_LEAST_PROCESSOR_SHARE = 0.02
"""Part of a processor that own work takes at least if it makes progress: threads that only poll take less."""
_LEAST_BYTES_PER_SECOND = 1 << 16
"""Bytes per second that own work reads and writes at least; a disk or network that gives less is taken as stuck."""


def beat_seconds(timeout_seconds: float) -> float:
    """Returns the seconds from one heartbeat to the next, for a run that may hang for `timeout_seconds`."""
    return min(max(timeout_seconds / _BEATS_PER_TIMEOUT, _SHORTEST_SECONDS), _LONGEST_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank."""

    run_id: str
    rank: int
    host: str
    pid: int
    count: int
    """Number of this heartbeat."""
    moves: int
    """Times that the rank was seen to begin something, or to work: the same while the rank makes no progress."""
    step: int
    """The step that the rank works on; 0 before the first."""
    activity: Activity
    own_work: str | None
    """What the rank does without the others, if the activity does not say it; None if it may wait for them."""

    @property
    def place(self) -> tuple[int, int, bool]:
        """Returns step and activity, in the order in which every rank goes through them.

        Of ranks in the same place, one that works without the others comes first: they wait for it.
        """
        return self.step, ACTIVITIES.index(self.activity), self.own_work is None

    def describe(self) -> str:
        """Returns step and activity in words."""
        return f"step {self.step}, {self.activity}" + (f" ({self.own_work})" if self.own_work else "")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What processes have done since they began."""

    seconds: float
    """Processor time."""
    bytes: int
    """Bytes that they have read and written, from disks, networks and the page cache."""

    @classmethod
    def of_this_process(cls) -> "Effort":
        """Returns the work of this process and of those that it has started, except the calling thread's."""
        process, times = psutil.Process(), os.times()
        seconds = time.process_time() - time.thread_time() + times.children_user + times.children_system
        count = _bytes(Path("/proc/self/io")) - _bytes(Path("/proc/thread-self/io"))
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                seconds += sum(child.cpu_times()[:4])
                count += _bytes(Path(f"/proc/{child.pid}/io"))
        return cls(seconds=seconds, bytes=count)

    def shows_motion_since(self, earlier: "Effort", *, seconds: float) -> bool:
        """Returns whether the processes moved in the seconds since; one that has ended has moved as well."""
        processor, count = abs(self.seconds - earlier.seconds), abs(self.bytes - earlier.bytes)
        return processor > _LEAST_PROCESSOR_SHARE * seconds or count > _LEAST_BYTES_PER_SECOND * seconds


def _bytes(path: Path) -> int:
    """Returns the bytes of a process or thread that Linux has counted; 0 on other systems."""
    try:
        fields = dict(line.split(": ") for line in path.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes"))  # the last: of memory-mapped files


class Heartbeat:
    """Writes what this rank is doing; called by the guard's thread alone."""

    def __init__(
        self,
        folder: RankFolder,
        *,
        rank: int,
        timeout_seconds: float | None,
        doing: Doing = doing,
        clock: Callable[[], float] = time.monotonic,
        effort: Callable[[], Effort] = Effort.of_this_process,
    ) -> None:
        """Begins without writing anything. `timeout_seconds`: None if the run is not watched: nothing is written."""
        self._folder = folder
        self._rank = rank
        self._timeout = timeout_seconds
        self._count = 0
        self._clock = clock
        self._due = clock()
        self._doing = doing
        self._moves = 0
        self._moved_at = clock()
        """When this many moves were first seen."""
        self._effort = effort
        self._last_effort: tuple[float, Effort] | None = None
        """The effort at the last heartbeat and its time; None if the rank did not work without the others then."""
        self._own_moves = 0
        """Heartbeats at which own work was seen to move."""
        self._has_stack = False
        """Whether the stack of the main thread is on disk, since it does not move."""

    def keep_up(self) -> None:
        """Writes the next heartbeat if it is due, and where the main thread is if it has not moved for long.

        Raises: OSError.
        """
        now = self._clock()
        if self._timeout is None or now < self._due:
            return
        self._due = now + beat_seconds(self._timeout)
        work = current_own_work()
        self._watch_own_work(work, now)
        moves = self._doing.moves + self._own_moves
        if moves != self._moves:
            self._moves, self._moved_at = moves, now
            if self._has_stack:
                self._has_stack = False
                self._folder.stack_file(self._rank).unlink(missing_ok=True)
        elif not self._has_stack and now - self._moved_at > _STACK_AT * self._timeout:
            self._has_stack = True
            write_text(self._folder.stack_file(self._rank), _main_thread())
        self._beat(work)

    def _watch_own_work(self, work: str | None, now: float) -> None:
        """Counts a move if the rank's own processes have worked since the last heartbeat, as own work does."""
        last, self._last_effort = self._last_effort, None
        if work is None:
            return
        self._last_effort = now, self._effort()
        if last is not None and self._last_effort[1].shows_motion_since(last[1], seconds=now - last[0]):
            self._own_moves += 1

    def _beat(self, work: str | None) -> None:
        self._count += 1
        step, activity = self._doing.place
        beat = Beat(
            run_id=self._folder.run_id,
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            count=self._count,
            moves=self._moves,
            step=step,
            activity=activity,
            own_work=work,
        )
        descriptor = os.open(self._folder.heartbeat_file(self._rank), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, json.dumps(asdict(beat)).ljust(_FILE_BYTES).encode(), 0)
        finally:
            os.close(descriptor)


def read_beat(folder: RankFolder, rank: int) -> Beat | None:
    """Returns the last heartbeat of a rank; None if it has written none in this run, or is writing one now."""
    with suppress(TypeError):
        return Beat(**folder.read(folder.heartbeat_file(rank)))
    return None


def silent_seconds(folder: RankFolder, rank: int, *, now: Path) -> float | None:
    """Returns for how long a rank has written no heartbeat; None if it does, or writes none.

    `now` is a file on the same disk that was just written: no clock of another machine is compared with this one's.
    """
    if read_beat(folder, rank) is None:
        return None
    seconds = now.stat().st_mtime - folder.heartbeat_file(rank).stat().st_mtime
    return seconds if seconds > 3 * _LONGEST_SECONDS else None


def _main_thread() -> str:
    """Returns the stack of the main thread, outermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))


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
    """Whether its heartbeat continues, so that it has written where it waits."""


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
        """Returns whether the heartbeat of a rank continues."""
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
        found = (read_beat(self._folder, rank) for rank in self._ranks)
        self._finder.observe(filter(None, found), now=now)
        if any(self._finder.answers(rank, now=now) for rank in self._leaves_it_to):
            return
        hang = self._finder.hang(ended=(), now=now)
        if self._is_long(hang):
            statuses = self._folder.read_statuses().values()
            hang = self._finder.hang(ended={one.rank for one in statuses if one.state != "running"}, now=now)
        self._report(hang if self._is_long(hang) else None)
        if hang is not None and hang.seconds > self._timeout:
            error = f"no progress for {hang.seconds:.0f} s ({hang.message})"
            self._folder.claim_failure(Failure.seen(self._folder.run_id, hang.rank, hang.host, error))

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
        path = self._folder.stack_file(hang.rank)
        return f"; where it waits: {path}" if hang.answers and path.exists() else ""


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
