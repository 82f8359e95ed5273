"""Heartbeats of ranks, and the rank that a run waits for.

The training loop says what it begins and what it has done (`activity.doing`); the guard's thread writes it every few
seconds into `OUTPUT_DIR/ranks/heartbeat_N`. So a rank that does not run at all (it was killed or stopped, or its
machine has gone) shows by a file that stays the same, and one whose main thread waits by a file that goes on and says
the same.

    training loop -> activity.doing -> guard: Heartbeat.keep_up -> file -> read_beat -> HangMonitor

Ranks wait for each other in every step, so when one hangs all of them make no progress. The one that is to blame has
started no heartbeat at all, or its heartbeat has stopped, or it is behind all others in the step. Where a connection
breaks first (`find_lost_rank`), files of ranks that are well change at once, and the others' do not.
"""

import faulthandler
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from evenpack.engine.activity import ACTIVITIES, START, Activity, Doing, doing
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankPlace

if TYPE_CHECKING:
    from evenpack.engine.config import RunSection

_BEAT_SECONDS, _SHORTEST_BEAT_SECONDS = 2.0, 0.2
_BEATS_PER_LIMIT = 20
_SILENT_BEATS = 5
"""Heartbeats that must be missed before a rank counts as silent."""
_WARN_AT = 0.5
"""Part of a limit without progress after which a hang is a warning."""
_STACK_AT = 0.4
"""Part of it after which a rank writes its stacks: before any warning."""
_FILE_BYTES = 512
"""Size of the file, padded with spaces: it is written in place, which a full disk does not prevent."""
_TOLD_SECONDS = 90.0
"""Seconds without a heartbeat after which a person is told, by a clock of file systems."""
LOST_SECONDS = 10.0
"""Seconds for every guard to answer: it looks twice a second, and waits for a main thread that holds Python's lock."""
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
    """Times that the rank has begun or done something: the same while it makes no progress."""
    step: int
    """The step that the rank works on; 0 before the first."""
    activity: Activity
    black_box: str | None
    """What the rank is in that does not tick; None if there is nothing of the kind."""

    @property
    def place(self) -> tuple[int, int, bool]:
        """Returns step and activity, in the order in which every rank goes through them.

        Of ranks in the same place, one in a black box comes first: the others may wait for it.
        """
        return self.step, ACTIVITIES.index(self.activity), self.black_box is None

    def describe(self) -> str:
        """Returns step and activity in words."""
        return f"step {self.step}, {self.activity}" + (f" ({self.black_box})" if self.black_box else "")


class Heartbeat:
    """Writes what this rank is doing; called by the guard's thread alone."""

    def __init__(
        self,
        folder: RankFolder,
        *,
        rank: int,
        limits: HangLimits | None,
        doing: Doing = doing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without writing anything. `limits`: None if nobody judges whether the run hangs."""
        self._folder = folder
        self._rank = rank
        self._limits = limits
        self._doing = doing
        self._count = 0
        self._moves = -1
        self._clock = clock
        self._due = clock()
        self._answered = False
        self._stacks: int | None = None
        """The open file of stacks; None before the first heartbeat, or where it cannot be written."""

    def keep_up(self) -> None:
        """Writes the next heartbeat if it is due, or another rank has lost a connection. Raises: OSError."""
        now = self._clock()
        answers = not self._answered and self._folder.lost_file.exists()
        if now < self._due and not answers:
            return
        self._answered |= answers
        self._due = now + beat_seconds(self._limits)
        if self._moves != self._doing.moves:
            self._moves = self._doing.moves
            self._arm_stacks()
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
            black_box=self._doing.black_box,
        )
        descriptor = os.open(self._folder.heartbeat_file(self._rank), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, json.dumps(asdict(beat)).ljust(_FILE_BYTES).encode(), 0)
        finally:
            os.close(descriptor)

    def _arm_stacks(self) -> None:
        """Lets a thread in C write the stacks, also of a main thread in C, unless the rank moves again before."""
        if self._limits is None:
            return
        with suppress(OSError):
            if self._stacks is None:
                path = self._folder.stack_file(self._rank)
                self._stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
            faulthandler.cancel_dump_traceback_later()
            if os.fstat(self._stacks).st_size:
                os.ftruncate(self._stacks, 0)  # a stack from before would mislead in the next hang
            limit = self._limits.seconds(in_black_box=self._doing.black_box is not None)
            faulthandler.dump_traceback_later(_STACK_AT * limit, file=self._stacks)


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
    return seconds if seconds > _TOLD_SECONDS else None


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
        self._silence = _SILENT_BEATS * beat_every
        self._seen: dict[int, _Seen] = {}
        self._began: float | None = None
        """When the first heartbeat of any rank was seen: before it, the launcher is still at work."""
        self._observed = now
        self._gaps = 0.0, 0.0
        """Seconds between the last three looks."""

    def observe(self, beats: Iterable[Beat], *, now: float) -> None:
        """Takes the newest heartbeats. A reader that was itself late, as on a machine that slept, begins again.

        One that is as late at every look, as where the disk is slow, would never see a hang, and does not begin again.
        """
        gap = now - self._observed
        if gap - min(self._gaps) > self._silence:
            self._seen, self._began = {}, None
        self._observed, self._gaps = now, (self._gaps[1], gap)
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
            return Hang(
                rank=absent[0],
                host="an unknown machine",
                seconds=seconds,
                message="it has not started",
                in_black_box=True,
            )
        silent = [rank for rank in seen if not self.answers(rank, now=now)]
        if silent:
            rank = min(silent, key=lambda rank: seen[rank].beat_at)
            hosts = {other: one.beat.host for other, one in seen.items()}
            what = _silence(seen[rank].beat, hosts, silent=silent)
        else:
            rank = min(ranks, key=lambda rank: seen[rank].beat.place)
            what = _behind_others([one.beat for one in seen.values()], seen[rank].beat)
        beat = seen[rank].beat
        return Hang(
            rank=rank,
            host=beat.host,
            seconds=seconds,
            message=f"{beat.describe()}{what and '; '}{what}",
            in_black_box=_any_in_black_box([one.beat for one in seen.values()]),
        )

    def answers(self, rank: int, *, now: float) -> bool:
        """Returns whether the heartbeat of a rank continues."""
        seen = self._seen.get(rank)
        return seen is not None and now - seen.beat_at <= self._silence


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
        limits: HangLimits,
        warn: Callable[[str], None],
        leaves_it_to: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to watch `ranks`; `leaves_it_to`: those among them that watch all, if `ranks` are not all."""
        self._folder = folder
        self._ranks = ranks
        self._limits = limits
        self._warn = warn
        self._clock = clock
        self._every = beat_seconds(limits)
        self._leaves_it_to = leaves_it_to
        self._finder = HangFinder(ranks, beat_every=self._every, now=clock())
        self._next = clock()
        self._has_warned = False

    @classmethod
    def of_rank(
        cls,
        place: RankPlace,
        folder: RankFolder,
        *,
        limits: HangLimits,
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
            limits=limits,
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
        hang = self._long_hang(now, ended=())
        if hang is not None:
            statuses = self._folder.read_statuses().values()
            hang = self._long_hang(now, ended={one.rank for one in statuses if one.state != "running"})
        self._report(hang)
        if hang is not None and hang.seconds > self._limits.seconds(in_black_box=hang.in_black_box):
            error = f"no progress for {hang.seconds:.0f} s ({hang.message})"
            self._folder.claim_failure(Failure.seen(self._folder.run_id, hang.rank, hang.host, error))

    def _long_hang(self, now: float, *, ended: Collection[int]) -> Hang | None:
        hang = self._finder.hang(ended=ended, now=now)
        if hang is None or hang.seconds <= _WARN_AT * self._limits.seconds(in_black_box=hang.in_black_box):
            return None
        return hang

    def _report(self, hang: Hang | None) -> None:
        """Warns once for each hang, and says when it is over."""
        if hang is not None and not self._has_warned:
            self._has_warned = True
            limit = self._limits.seconds(in_black_box=hang.in_black_box)
            key = "run.start_timeout_seconds" if limit > self._limits.step_seconds else "run.hang_timeout_seconds"
            path = self._folder.stack_file(hang.rank)
            stack = f"; where it waits: {path}" if path.exists() and path.stat().st_size else ""
            self._warn(
                f"no progress for {hang.seconds:.0f} s: rank {hang.rank} on {hang.host} ({hang.message}). The run "
                f"ends after {limit:g} s of it ({key}){stack}"
            )
        elif self._has_warned and hang is None:
            self._has_warned = False
            if self._folder.read_failure() is None:  # a rank that wakes too late ends all the same
                self._warn("the run goes on")


def find_lost_rank(
    folder: RankFolder, rank: int, world_size: int, first_failure: Callable[[], Failure | None]
) -> Failure | None:
    """Notes that `rank` has lost a connection, upon which every rank that is well writes a heartbeat.

    Returns: the failure that another process has recorded meanwhile, or that of the first rank whose heartbeat has
    stopped, which is recorded now; None if all go on, so that only the network has failed.
    """
    own = folder.heartbeat_file(rank)
    with suppress(OSError):
        folder.lost_file.touch(exist_ok=False)
    with suppress(OSError):
        os.utime(own)  # at once: a launcher such as mpirun ends every rank a second after the first
    lost_at = _changed_at(folder.lost_file) or _changed_at(own)  # the disk may be full
    deadline = time.monotonic() + LOST_SECONDS
    while (failure := first_failure()) is None and (stopped := _stopped(folder, world_size, since=lost_at)):
        if time.monotonic() > deadline:
            with suppress(OSError):
                return folder.claim_failure(_lost(folder, stopped))
            return None
        time.sleep(_POLL_SECONDS)
    if failure is None:  # a rank that could not record its failure, as on a full disk, has a status all the same
        failed = [one for one in folder.read_statuses().values() if one.state == "failed" and one.rank != rank]
        failure = Failure.of(failed[0]) if failed else None
    return failure


def find_first_stopped(folder: RankFolder, world_size: int) -> Failure | None:
    """Returns the failure of a run whose launcher has ended all ranks after one had lost a connection; else None.

    Those that have written since were alive then; of the rest, one was the first to end.
    """
    lost_at = _changed_at(folder.lost_file)
    stopped = _stopped(folder, world_size, since=lost_at) if lost_at else []
    if not stopped:
        return None
    others = f", if it was not one of {', '.join(map(str, stopped[1:]))}" if stopped[1:] else ""
    error = f"others have lost their connection to it{others}; the launcher has ended all ranks since"
    return _failure(folder, stopped[0], error)


def _stopped(folder: RankFolder, world_size: int, *, since: int) -> list[int]:
    """Returns the ranks that have not ended by themselves and have written no heartbeat since a time of the disk."""
    folder.refresh()
    statuses = folder.read_statuses()
    return [
        rank
        for rank in range(world_size)
        if (rank not in statuses or statuses[rank].state == "running")
        and (read_beat(folder, rank) is None or _changed_at(folder.heartbeat_file(rank)) < since)
    ]


def _changed_at(path: Path) -> int:
    """Returns when a file was last written, by the clock of its disk in nanoseconds; 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _lost(folder: RankFolder, stopped: Collection[int]) -> Failure:
    hosts = {rank: status.host for rank, status in folder.read_statuses().items()}
    started = [rank for rank in stopped if rank in hosts]
    if not started:
        return _failure(folder, min(stopped), "it has not started, or its machine does not see run.output_dir")
    silence = _describe_silence(min(started), hosts, silent=stopped)
    return _failure(folder, min(started), f"others have lost their connection to it; {silence}")


def _failure(folder: RankFolder, rank: int, error: str) -> Failure:
    status = folder.read_status(rank)
    return Failure.seen(folder.run_id, rank, "an unknown machine" if status is None else status.host, error)


def _any_in_black_box(beats: Collection[Beat]) -> bool:
    """Returns whether a rank is in what does not tick.

    The last heartbeat of a silent rank may be from before the end of it. Ranks end each step together: nobody is in
    the start when another has left it, nor in any when another is two steps further.
    """
    furthest = max(beat.step for beat in beats)
    all_start = all(beat.black_box == START for beat in beats)
    return any(
        all_start if beat.black_box == START else beat.black_box is not None and beat.step >= furthest - 1
        for beat in beats
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
    return f"{_describe_silence(beat.rank, hosts, silent=silent)} (process {beat.pid})"


def _describe_silence(rank: int, hosts: Mapping[int, str], *, silent: Collection[int]) -> str:
    """Describes a rank whose heartbeat has stopped, by whether those of its machine have; `hosts` by rank."""
    here = [other for other in sorted(hosts) if hosts[other] == hosts[rank]]
    if not set(here) <= set(silent):
        return "it does not answer, though its machine does: it was killed or stopped"
    if len(here) == 1:
        return "it does not answer: it was killed or stopped, or its machine is down or not reachable"
    return f"none of the ranks {here[0]} to {here[-1]} of its machine answers: the machine is down or not reachable"


def _process_state(beat: Beat) -> str:
    """Describes a process of this machine."""
    try:
        state = psutil.Process(beat.pid).status()
    except psutil.Error:
        return f"process {beat.pid} does not exist any more"
    if state == psutil.STATUS_STOPPED:
        return f"process {beat.pid} is stopped (SIGSTOP); SIGCONT makes it go on"
    return f"process {beat.pid} is {state}"
