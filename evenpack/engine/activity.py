"""What a rank is doing, so that other processes can see whether it makes progress.

doing      of this process, which a loop tells what it begins (`enter`), and each piece that it has done (`tick`)
own_work   the main thread does, or waits for, something that no other rank takes part in: a file, a compilation
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, TypeVar, get_args

ValueT = TypeVar("ValueT")

Activity = Literal[
    "starting",
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
    "saving a checkpoint",
    "waiting for a save",
    "writing the summary",
]
"""What a rank can be doing, in the order of a step; a rank waits for a save when its own part of it is on disk. On a
GPU the host is ahead of the device: it issues work and waits for it when it sums over the ranks."""

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)


class Doing:
    """What the main thread of a process is doing; other threads read it, and those that it may wait for tick.

    There is one for the process, `doing`, as there is one logger of a module: what ticks needs no argument for it.
    """

    def __init__(self) -> None:
        self.place: tuple[int, Activity] = (0, "starting")
        """The step that the rank works on, from 1 on, and what it does in it; together, so that no reader mixes two."""
        self.moves = 0
        """Times that something has begun or was done: the same while the rank makes no progress."""

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


doing = Doing()

_own_work: list[str] = []


def begin_own_work(what: str = "") -> None:
    """Begins what `own_work` marks, where no block can."""
    _own_work.append(what)


def end_own_work(what: str = "") -> None:
    """Ends what `begin_own_work` began."""
    _own_work.remove(what)


@contextmanager
def own_work(what: str = "") -> Iterator[None]:
    """Marks that the rank works without the others: its main thread, or threads and processes that it waits for.

    Within the block, processor time and bytes of this process and its children are progress, because long work such as
    reading one file shows no other. So nothing within may wait for another rank: that may take processor time, too.
    `what` is said in messages if the activity does not say it.
    """
    begin_own_work(what)
    try:
        yield
    finally:
        end_own_work(what)


def current_own_work() -> str | None:
    """Returns what the rank does without the others, which may be empty; None if it does nothing of the kind."""
    last = _own_work[-1:]  # another thread may end it meanwhile
    return last[0] if last else None


def each_as_own_work(items: Iterator[ValueT]) -> Iterator[ValueT]:
    """Yields the items of an iterator, none of them None, that makes each of them without other ranks."""
    while True:
        with own_work():
            item = next(items, None)
        if item is None:
            return
        yield item


@contextmanager
def entered_as_own_work(context: AbstractContextManager[ValueT]) -> Iterator[ValueT]:
    """Enters and leaves a context that begins and ends without other ranks."""
    with ExitStack() as around, ExitStack() as inside:
        with own_work():
            value = inside.enter_context(context)
        inside.callback(around.enter_context, own_work())  # the last to be added is the first to be called
        yield value


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
