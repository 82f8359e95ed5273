"""Who tokenises parts: processes of this machine (`concurrent.futures`), or MPI ranks on many (`mpi4py.futures`)."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

from evenpack.data.prepare.tokenising.part_files import PartFile, PartTask, write_part
from evenpack.errors import RunError

_PRELOADED = ["evenpack.data.prepare.tokenising.part_files"]
_DEATHS_WITHOUT_PROGRESS = 3


@runtime_checkable
class Workers(Protocol):
    """Processes that tokenise parts."""

    @property
    def count(self) -> int:
        """How many there are."""

    def files(self, tasks: Iterable[PartTask], note: Callable[[str], None]) -> Generator[PartFile, None, None]:
        """The parts' token files in the order of the tasks, each as soon as those before it are there.

        Tasks are taken a bounded number ahead. When it is closed early, the workers stop.

        Raises: what a task has raised, when its turn comes; RunError if workers die again and again.
        """


class LocalWorkers:
    """Processes of this machine. A worker that dies costs the parts at work, which are resumed by new workers."""

    def __init__(self, count: int) -> None:
        """Starts none yet."""
        if count < 1:
            raise ValueError(f"expected at least 1 worker, got {count}")
        self.count = count

    def files(self, tasks: Iterable[PartTask], note: Callable[[str], None]) -> Generator[PartFile, None, None]:
        remaining = deque(tasks)
        deaths = 0
        while remaining:
            try:
                with self._pool() as pool:
                    for file in _in_order(pool, remaining, ahead=_ahead(self.count)):
                        remaining.popleft()
                        deaths = 0
                        yield file
            except BrokenExecutor as error:
                deaths += 1
                parts = _numbers(list(remaining)[: _ahead(self.count)])
                if deaths == _DEATHS_WITHOUT_PROGRESS:
                    raise RunError(
                        f"workers died {deaths} times while they tokenised {parts} of source "
                        f"'{remaining[0].source}', and no part was finished in between: where memory is short, take "
                        "fewer --workers; the same command goes on from here"
                    ) from error
                note(f"warning: a worker died; {parts}, as far as they were not finished, are resumed by new ones")

    @contextmanager
    def _pool(self) -> Iterator[ProcessPoolExecutor]:
        """Workers that end when the block does, whatever they are at, and when this process dies."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        lifeline, end = context.Pipe(duplex=False)
        cores = max(1, len(os.sched_getaffinity(0)) // self.count)
        pool = ProcessPoolExecutor(
            self.count, mp_context=context, initializer=_begin_worker, initargs=(lifeline, cores)
        )
        try:
            yield pool
        except BaseException:
            end.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            end.close()
            lifeline.close()


class MpiWorkers:
    """MPI ranks, on any number of machines, as an executor of `mpi4py.futures`.

    A rank that dies ends the whole job, as MPI does; the same command resumes the parts that are not finished.
    """

    def __init__(self, executor: Executor, count: int) -> None:
        """`executor`: of `MPICommExecutor`, in its root."""
        self._executor = executor
        self.count = count

    def files(self, tasks: Iterable[PartTask], note: Callable[[str], None]) -> Generator[PartFile, None, None]:
        yield from _in_order(self._executor, tasks, ahead=_ahead(self.count))


def local_workers(count: int | None) -> LocalWorkers | None:
    """Workers of this machine; None for 1, which this process is itself. By default one for each two cores."""
    count = count or max(1, len(os.sched_getaffinity(0)) // 2)
    return None if count == 1 else LocalWorkers(count)


def _ahead(workers: int) -> int:
    """How many parts may be at work or finished while the first of them is not: one large part delays nobody."""
    return 4 * workers


def _in_order(executor: Executor, tasks: Iterable[PartTask], *, ahead: int) -> Iterator[PartFile]:
    pending: deque[Future[PartFile]] = deque()
    try:
        for task in tuple(tasks):
            pending.append(executor.submit(write_part, task))
            if len(pending) == ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _numbers(tasks: list[PartTask]) -> str:
    return f"part {tasks[0].number}" if len(tasks) == 1 else f"parts {tasks[0].number} to {tasks[-1].number}"


def _begin_worker(lifeline: Connection, cores: int) -> None:
    """Interrupts are the parent's; the worker ends with the other end of `lifeline`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(cores)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)
