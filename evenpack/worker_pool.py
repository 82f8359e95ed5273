"""Worker processes that end with the process that started them, however it ends, and their named resources.

multiprocessing gives its semaphores names in shared memory, which stay until somebody removes them: exit handlers, or
a process of its own, the resource tracker, when all others are gone. Its sockets are files in a temporary folder.

A process may also end itself without the interpreter's teardown, which takes torch's modules most of a second.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.synchronize import SemLock
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_DEATH_SECONDS = 0.05
"""Seconds in which all connections to a process that has died are lost."""
_LONGEST_TEMPORARY = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes that a temporary folder's name may have, for multiprocessing's sockets in it: a name has 107."""


@contextmanager
def worker_pool(
    count: int, *, preloaded: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yields workers that end with the block, at once if an error leaves it, and when this process dies.

    They are not forked from this process, which may have threads. They import the main script again, so a script that
    uses them must begin its work below `if __name__ == "__main__":`.

    Args:
        preloaded: modules that are imported once for all workers.
        environment: variables of the workers, in addition to those that this process had when it first started any.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded])
    make_sockets_of_short_names()
    lifeline, end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_begin_worker, initargs=(lifeline, dict(environment or {}))
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


def make_sockets_of_short_names() -> None:
    """Lets multiprocessing open its sockets in /tmp if the temporary folder's name is too long for a socket's.

    That of a job in a cluster often is. Later versions of Python do so themselves.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY:
        with suppress(OSError):  # without such a folder multiprocessing says what fails
            folder = config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


def _begin_worker(lifeline: Connection, environment: Mapping[str, str]) -> None:
    """Prepares a worker: interrupts are the parent's, and the worker ends with the other end of `lifeline`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    threading.Thread(target=end_with_parent, args=(lifeline,), daemon=True).start()


def end_with_parent(*lifelines: Connection) -> None:
    """Ends this process of multiprocessing when its parent ends, or closes the other end of a lifeline.

    It removes the folder of sockets that a parent which was killed has left.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing has started it"
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    multiprocessing.connection.wait([parent.sentinel, *lifelines])
    if multiprocessing.connection.wait([parent.sentinel], _DEATH_SECONDS) and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def make_sockets_without_files() -> None:
    """Gives the sockets of multiprocessing that this process opens from now on addresses that are not files.

    Linux has them; whoever connects must know the key of these processes as before. Elsewhere they stay files.
    """
    if sys.platform == "linux":
        connection = multiprocessing.connection
        connection.arbitrary_address = lambda _family: f"\0evenpack-{uuid.uuid4().hex}"  # type: ignore[attr-defined]


def is_resource_tracker(command: Sequence[str]) -> bool:
    """Returns whether a command line starts a resource tracker.

    Code that kills the other processes of a program leaves it out: it ends by itself, and removes their resources.
    """
    return any("multiprocessing.resource_tracker" in argument for argument in command)


def named_semaphores() -> set[util.Finalize]:
    """Returns what removes the names of this process's semaphores, one for each."""
    cleanup = SemLock._cleanup  # type: ignore[attr-defined]
    registered = list(util._finalizer_registry.values())  # type: ignore[attr-defined]
    return {one for one in registered if getattr(one, "_callback", None) is cleanup}


def remove_names(semaphores: Iterable[util.Finalize]) -> None:
    """Removes names of semaphores; a process that has opened one can go on using it."""
    for finalizer in semaphores:
        with suppress(OSError):
            finalizer()


def map_in_order(function: Callable[[T], R], items: Iterator[T], executor: Executor, *, threads: int) -> Iterator[R]:
    """Calls `map` in order, in the executor's threads, at most one call ahead of each."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) > threads:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class QuickEnd:
    """Ends this process by `os._exit` once it has an exit code and exit handlers registered later have run."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """None: the process ends in the usual way, as after an error that nothing has caught."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.exit_code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.exit_code)
