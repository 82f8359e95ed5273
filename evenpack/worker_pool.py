"""Worker processes that end with the process that started them, however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection


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


def _begin_worker(lifeline: Connection, environment: Mapping[str, str]) -> None:
    """Prepares a worker: interrupts are the parent's, and the worker ends with the other end of `lifeline`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)
