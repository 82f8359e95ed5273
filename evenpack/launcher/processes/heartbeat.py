"""The heartbeat of each rank, in `OUTPUT_DIR/ranks/heartbeat_N`.

The training loop says what it begins to do; the guard's thread writes it down. So a rank that does not run at all (it
is stopped, or its machine has gone) shows by a heartbeat that stays the same, and a rank whose training waits for
something shows by a heartbeat that goes on and says the same. Where a rank works without the others (`own_work`), the
processor time and the bytes of its processes show whether it moves.

    training loop -> Heartbeat.enter -> guard: Heartbeat.keep_up -> file -> read_beat -> hangs.py
"""

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from evenpack.engine.activity import ACTIVITIES, Activity, current_own_work
from evenpack.files import read_json_object, write_text

_BEATS_PER_TIMEOUT = 20
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.2, 30.0
_STACK_AT = 0.4
"""Part of the time-out without progress after which a rank writes its stack: before anybody warns."""
_FILE_BYTES = 512
"""Size of the file, padded with spaces: it is written in place, which a full disk does not prevent."""

_LEAST_PROCESSOR_SHARE = 0.02
"""Part of a processor that own work takes at least if it moves: threads that only look for something take less."""
_LEAST_BYTES_PER_SECOND = 1 << 16
"""The same of bytes read and written: a disk or network that gives less stands still."""


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
        """Returns that of this process and those that it has started, without the calling thread's own."""
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


@dataclass(frozen=True, kw_only=True)
class _Moment:
    moves: int
    step: int
    activity: Activity
    since: float
    """`time.monotonic` of this process."""


class Heartbeat:
    """What this rank is doing. The main thread calls `enter`, the guard's thread `keep_up`."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        rank: int,
        timeout_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        effort: Callable[[], Effort] = Effort.of_this_process,
    ) -> None:
        """Begins without writing anything. `timeout_seconds`: None means that nobody watches, so nothing is written."""
        self._folder = folder
        self._run_id = run_id
        self._rank = rank
        self._timeout = timeout_seconds
        self._count = 0
        self._clock = clock
        self._due = clock()
        self._moment = _Moment(moves=0, step=0, activity="starting", since=clock())
        self._effort = effort
        self._last_effort: tuple[float, Effort] | None = None
        """The effort at the last heartbeat and its time; None if the rank did not work without the others then."""
        self._own_moves = 0
        """Heartbeats at which own work was seen to move; only the guard's thread writes it, the main one `_moment`."""
        self._own_moved_at = -math.inf
        self._stack_of: int | None = None
        """The moves at which the stack on disk was written; None: there is none."""

    @property
    def activity(self) -> Activity:
        """Returns what the rank is doing."""
        return self._moment.activity

    def enter(self, activity: Activity, step: int) -> None:
        """Notes what the rank begins to do, and in which step."""
        moves = self._moment.moves + 1
        self._moment = _Moment(moves=moves, step=step, activity=activity, since=self._clock())

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
        moment = self._moment
        moves = moment.moves + self._own_moves
        if self._stack_of not in (None, moves):
            self._stack_of = None
            stack_file(self._folder, self._rank).unlink(missing_ok=True)
        if self._stack_of is None and now - max(moment.since, self._own_moved_at) > _STACK_AT * self._timeout:
            self._stack_of = moves
            write_text(stack_file(self._folder, self._rank), _main_thread())
        self._beat(moment, moves, work)

    def _watch_own_work(self, work: str | None, now: float) -> None:
        """Counts a move if the rank's own processes have worked since the last heartbeat, as own work does."""
        last, self._last_effort = self._last_effort, None
        if work is None:
            return
        self._last_effort = now, self._effort()
        if last is not None and self._last_effort[1].shows_motion_since(last[1], seconds=now - last[0]):
            self._own_moves += 1
            self._own_moved_at = now

    def _beat(self, moment: _Moment, moves: int, work: str | None) -> None:
        self._count += 1
        beat = Beat(
            run_id=self._run_id,
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            count=self._count,
            moves=moves,
            step=moment.step,
            activity=moment.activity,
            own_work=work,
        )
        descriptor = os.open(heartbeat_file(self._folder, self._rank), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, json.dumps(asdict(beat)).ljust(_FILE_BYTES).encode(), 0)
        finally:
            os.close(descriptor)


def stack_file(folder: Path, rank: int) -> Path:
    """Returns the file into which a rank without progress writes where its main thread is."""
    return folder / f"stack_{rank}.txt"


def heartbeat_file(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeat in `OUTPUT_DIR/ranks`."""
    return folder / f"heartbeat_{rank}"


def read_beat(folder: Path, rank: int, *, run_id: str) -> Beat | None:
    """Returns the last heartbeat of a rank; None if it has written none in this run, or is writing one now."""
    values = read_json_object(heartbeat_file(folder, rank)) or {}
    with suppress(TypeError):
        beat = Beat(**values)
        return beat if beat.run_id == run_id else None
    return None


def silent_seconds(folder: Path, rank: int, *, run_id: str, now: Path) -> float | None:
    """Returns for how long a rank has written no heartbeat; None if it does, or writes none.

    `now` is a file on the same disk that was just written: no clock of another machine is compared with this one's.
    """
    if read_beat(folder, rank, run_id=run_id) is None:
        return None
    seconds = now.stat().st_mtime - heartbeat_file(folder, rank).stat().st_mtime
    return seconds if seconds > 3 * _LONGEST_SECONDS else None


def _main_thread() -> str:
    """Returns the stack of the main thread, outermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))
