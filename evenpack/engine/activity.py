"""What a rank is doing, for those who watch whether it goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Activity = Literal[
    "starting",
    "opening the data",
    "building the model",
    "converting the checkpoint",
    "starting the loader",
    "waiting for a batch",
    "computing gradients",
    "reducing gradients",
    "updating weights",
    "summing over the ranks",
    "evaluating",
    "recording the step",
    "saving a checkpoint",
    "waiting for a save",
]
"""In the order in which a step goes through them; a rank waits for a save when its own part of it is on disk. On a GPU
the host is ahead of the device: it issues work and waits for it when it sums over the ranks."""

ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

OnActivity = Callable[[Activity, int], None]
"""Called with what the rank begins to do, and the number of the step that it does it in; steps count from 1."""


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


def ignore_activity(activity: Activity, step: int) -> None:
    """Does nothing: nobody watches."""


class StepActivities:
    """Tells what a rank begins to do within a step, from the phases that its engine has ended."""

    def __init__(self, on_activity: OnActivity, *, micro_batches: int) -> None:
        """`micro_batches`: of a step on this rank."""
        self._on_activity = on_activity
        self._micro_batches = micro_batches
        self._step = 0
        self._left = 0

    def begin(self, step: int) -> None:
        """Begins to compute."""
        self._step, self._left = step, self._micro_batches
        self._on_activity("computing gradients", step)

    def end_of(self, phase: str) -> None:
        """Takes a phase of `TrainingEngine` that has ended: its observer."""
        if phase == "backward":
            self._left -= 1
            # Each micro-batch is progress: many of them may take longer than a run may hang.
            self._on_activity("computing gradients" if self._left else "reducing gradients", self._step)
        elif phase == "all_reduce":
            self._on_activity("updating weights", self._step)
        elif phase == "update":
            self._on_activity("summing over the ranks", self._step)
