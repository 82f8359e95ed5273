"""The heartbeat of each rank, in `OUTPUT_DIR/ranks/heartbeat_N`.

The training loop says what it begins to do; the guard's thread writes it down. So a rank that does not run at all (it
is stopped, or its machine has gone) shows by a heartbeat that stays the same, and a rank whose training waits for
something shows by a heartbeat that goes on and says the same.

    training loop -> Heartbeat.enter -> guard: Heartbeat.keep_up -> file -> read_beat -> hangs.py
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from evenpack.engine.activity import ACTIVITIES, Activity
from evenpack.files import read_json_object, write_text

_BEATS_PER_TIMEOUT = 20
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.2, 30.0
_STACK_AT = 0.4
"""Part of the time-out without progress after which a rank writes its stack: before anybody warns."""
_FILE_BYTES = 512
"""Size of the file, padded with spaces: it is written in place, which a full disk does not prevent."""


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
    """Number of times that the rank has begun something: it stays the same while the rank makes no progress."""
    step: int
    """The step that the rank works on; 0 before the first."""
    activity: Activity

    @property
    def place(self) -> tuple[int, int]:
        """Returns step and activity, in the order in which every rank goes through them."""
        return self.step, ACTIVITIES.index(self.activity)


@dataclass(frozen=True, kw_only=True)
class _Moment:
    moves: int
    step: int
    activity: Activity
    since: float
    """`time.monotonic` of this process."""


class Heartbeat:
    """What this rank is doing. The main thread calls `enter`, the guard's thread `keep_up`."""

    def __init__(self, folder: Path, *, run_id: str, rank: int, timeout_seconds: float | None) -> None:
        """Begins without writing anything. `timeout_seconds`: None means that nobody watches, so nothing is written."""
        self._folder = folder
        self._run_id = run_id
        self._rank = rank
        self._timeout = timeout_seconds
        self._count = 0
        self._due = time.monotonic()
        self._moment = _Moment(moves=0, step=0, activity="starting", since=time.monotonic())
        self._stack_of: int | None = None
        """The moves at which the stack on disk was written; None: there is none."""

    @property
    def activity(self) -> Activity:
        """Returns what the rank is doing."""
        return self._moment.activity

    def enter(self, activity: Activity, step: int) -> None:
        """Notes what the rank begins to do, and in which step."""
        moves = self._moment.moves + 1
        self._moment = _Moment(moves=moves, step=step, activity=activity, since=time.monotonic())

    def keep_up(self) -> None:
        """Writes the next heartbeat if it is due, and where the main thread is if it has not moved for long.

        Raises: OSError.
        """
        now = time.monotonic()
        if self._timeout is None or now < self._due:
            return
        self._due = now + beat_seconds(self._timeout)
        moment = self._moment
        if self._stack_of not in (None, moment.moves):
            self._stack_of = None
            stack_file(self._folder, self._rank).unlink(missing_ok=True)
        if self._stack_of is None and now - moment.since > _STACK_AT * self._timeout:
            self._stack_of = moment.moves
            write_text(stack_file(self._folder, self._rank), _main_thread())
        self._beat(moment)

    def _beat(self, moment: _Moment) -> None:
        self._count += 1
        beat = Beat(
            run_id=self._run_id,
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            count=self._count,
            moves=moment.moves,
            step=moment.step,
            activity=moment.activity,
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
