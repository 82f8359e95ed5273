"""What a rank is doing, so that other processes can see whether it makes progress.

doing.enter("evaluating", step)         the main thread begins something
doing.tick()                            a long loop has done a piece
doing.begin_black_box("compiling")      what follows gives no ticks
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

Activity = Literal[
    "starting",
    "joining the ranks",
    "opening the data",
    "building the model",
    "loading the checkpoint",
    "converting the checkpoint",
    "starting the loader",
    "waiting for a batch",
    "computing gradients",
    "reducing gradients",
    "updating weights",
    "summing over the ranks",
    "evaluating",
    "recording the step",
    "verifying the data",
    "waiting for verification",
    "saving a checkpoint",
    "waiting for a save",
    "writing the summary",
]
"""What a rank can be doing, in the order of a step; a rank waits for a save when its own part of it is on disk. On a
GPU the host is ahead of the device: it issues work and waits for it when it sums over the ranks."""

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

START = "the start"
"""The black box in which a process begins, until its first step ends."""


class Doing:
    """What the main thread of a process is doing; other threads read it, and those that it may wait for tick.

    There is one for the process, `doing`, as there is one logger of a module: what ticks needs no argument for it.
    """

    def __init__(self) -> None:
        self.place: tuple[int, Activity] = (0, "starting")
        """The step that the rank works on, from 1 on, and what it does in it; together, so that no reader mixes two."""
        self.moves = 0
        """Times that something has begun or was done: the same while the rank makes no progress."""
        self._black_boxes = [START]

    @property
    def step(self) -> int:
        """Returns the step that the rank works on; 0 before the first."""
        return self.place[0]

    @property
    def activity(self) -> Activity:
        """Returns what the rank does in it."""
        return self.place[1]

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """Notes what the main thread begins; `step`: None if it goes on with the same."""
        self.place = (self.step if step is None else step, activity)
        self.tick()

    def tick(self) -> None:
        """Notes that a long loop has done a piece: a file, a batch, a tensor."""
        self.moves += 1

    @property
    def black_box(self) -> str | None:
        """Returns the last to begin of what gives no ticks, and so has a limit of its own; None outside of it."""
        last = self._black_boxes[-1:]  # another thread may end it meanwhile
        return last[0] if last else None

    def begin_black_box(self, what: str) -> None:
        """Notes that something begins which does not tick: only its end will show that it moved."""
        self._black_boxes.append(what)
        self.tick()

    def end_black_box(self, what: str) -> None:
        """Notes its end, if it has begun."""
        with suppress(ValueError):
            self._black_boxes.remove(what)
            self.tick()


doing = Doing()

_saving_threads: set[threading.Thread] = set()


@contextmanager
def saving() -> Iterator[None]:
    """Marks that this thread writes a checkpoint, while the main thread may be anywhere."""
    _saving_threads.add(threading.current_thread())
    try:
        yield
    finally:
        _saving_threads.discard(threading.current_thread())


def is_saving() -> bool:
    """Returns whether a thread of this process writes a checkpoint."""
    return bool(_saving_threads)
