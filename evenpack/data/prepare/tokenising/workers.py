"""Processes that tokenise parts, on this machine (`concurrent.futures`), or MPI ranks on many (`mpi4py.futures`)."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from evenpack.data.prepare.tokenising.part_files import PartFile, PartTask, stop_file, write_part
from evenpack.errors import RunError
from evenpack.worker_pool import worker_pool

_PRELOADED = ["evenpack.data.prepare.tokenising.part_files"]
_DEATHS_WITHOUT_PROGRESS = 3
_SECONDS_BETWEEN_LOOKS = 3.0

_Pending = deque[tuple[PartTask, Future[PartFile]]]
"""Tasks in order, and what will come of them."""


@runtime_checkable
class Observer(Protocol):
    """Whoever waits for the files."""

    def note(self, message: str) -> None:
        """Something to be reported once."""

    def waiting(self, tasks: Sequence[PartTask]) -> None:
        """Called every few seconds while nothing is ready, with the tasks that are at work or ready."""


@runtime_checkable
class Workers(Protocol):
    """Processes that tokenise parts."""

    def files(self, tasks: Sequence[PartTask], observer: Observer) -> Generator[PartFile, None, None]:
        """The parts' token files in the order of the tasks, each as soon as those before it are there.

        Tasks are taken a bounded number ahead. When it is closed early, it returns once no worker writes any more.

        Raises: the error of a task, in the order of tasks; RunError if workers die repeatedly.
        """


class LocalWorkers:
    """Processes of this machine. A worker that dies costs the parts at work, which new workers resume.

    They import the main script again, so a script that uses them must begin its work below
    `if __name__ == "__main__":`.
    """

    def __init__(self, count: int) -> None:
        """Takes the number of workers; starts none yet."""
        if count < 1:
            raise ValueError(f"expected at least 1 worker, got {count}")
        self._count = count

    def files(self, tasks: Sequence[PartTask], observer: Observer) -> Generator[PartFile, None, None]:
        remaining = deque(tasks)
        deaths = 0
        while remaining:
            try:
                with self._pool() as pool:
                    for file in _in_order(pool, tuple(remaining), _ahead(self._count), observer):
                        remaining.popleft()
                        deaths = 0
                        yield file
            except BrokenExecutor as error:
                deaths += 1
                parts = _numbers(list(remaining)[: _ahead(self._count)])
                if deaths == _DEATHS_WITHOUT_PROGRESS:
                    raise RunError(
                        f"workers died {deaths} times while they tokenised {parts} of source "
                        f"'{remaining[0].source}', and no part was finished in between: where memory is short, use "
                        'fewer --workers; a script must call prepare below `if __name__ == "__main__":`. The same '
                        "command resumes from here"
                    ) from error
                observer.note(f"warning: a worker died; the unfinished ones of {parts} are resumed by new workers")

    def _pool(self) -> AbstractContextManager[Executor]:
        cores = max(1, len(os.sched_getaffinity(0)) // self._count)
        return worker_pool(self._count, preloaded=_PRELOADED, environment={"RAYON_NUM_THREADS": str(cores)})


class MpiWorkers:
    """MPI ranks, on any number of machines, as an executor of `mpi4py.futures`.

    A rank that dies ends the whole job, as MPI does; the same command resumes the parts that are not finished.
    """

    def __init__(self, executor: Executor, count: int) -> None:
        """Takes the `executor` of `MPICommExecutor`, in its root."""
        self._executor = executor
        self._count = count

    def files(self, tasks: Sequence[PartTask], observer: Observer) -> Generator[PartFile, None, None]:
        yield from _in_order(self._executor, tasks, _ahead(self._count), observer, end=_request_exit)


def local_workers(count: int | None) -> LocalWorkers | None:
    """Returns workers of this machine; None for 1, which is this process itself.

    The default is one for each two cores.
    """
    count = count or max(1, len(os.sched_getaffinity(0)) // 2)
    return None if count == 1 else LocalWorkers(count)


def _ahead(workers: int) -> int:
    """Returns how many parts may be in work or finished before the first of them is: one large part delays no other."""
    return 4 * workers


def _in_order(
    executor: Executor,
    tasks: Sequence[PartTask],
    ahead: int,
    observer: Observer,
    *,
    end: Callable[[_Pending], None] = lambda _: None,
) -> Iterator[PartFile]:
    """`end` is given what is at work when the iteration ends early."""
    pending: _Pending = deque()
    try:
        for task in tasks:
            pending.append((task, executor.submit(write_part, task)))
            if len(pending) == ahead:
                yield _first(pending, observer)
        while pending:
            yield _first(pending, observer)
    finally:
        if at_work := deque(entry for entry in pending if not entry[1].cancel()):
            end(at_work)


def _request_exit(pending: _Pending) -> None:
    """Returns when none of these writes any more: what is at work on another host cannot be cancelled."""
    for folder in {task.prefix.parents[1] for task, _ in pending}:
        folder.mkdir(parents=True, exist_ok=True)
        stop_file(folder).touch()
    wait([future for _, future in pending])


def _first(pending: _Pending, observer: Observer) -> PartFile:
    _, future = pending[0]
    while not wait([future], timeout=_SECONDS_BETWEEN_LOOKS).done:
        observer.waiting([task for task, _ in pending])
    pending.popleft()
    return future.result()


def _numbers(tasks: list[PartTask]) -> str:
    return f"part {tasks[0].number}" if len(tasks) == 1 else f"parts {tasks[0].number} to {tasks[-1].number}"
