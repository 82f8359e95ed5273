"""Processes that load batches: their signals, and the message when one of them ends."""

import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util

from evenpack.errors import RunError
from evenpack.worker_pool import QuickEnd, end_with_parent, make_sockets_without_files, remove_names

_TORCH_MESSAGE = "DataLoader worker (pid"

_SECONDS_TO_SIGNAL = 1.0
"""Seconds from a lost connection to the signal that the process has ended."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Blocks stop signals in this thread, and in processes that it starts, until they begin as loaders."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_loader_process(_worker: int) -> None:
    """Makes this process one that loads batches: `worker_init_fn` of torch's DataLoader.

    It ignores the first stop signal, which `deepspeed` sends to loaders too: a run needs batches until its step ends. A
    second SIGTERM ends it, which is how torch ends loaders that do not exit. It ends with its rank, also with one that
    died before this call: torch watches whichever parent it finds then.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    make_sockets_without_files()  # for handing over batches: files would stay if this process is killed
    threading.Thread(target=end_with_parent, daemon=True).start()
    QuickEnd().exit_code = 0  # the rank waits for this process at the end of a run


class LoaderNames:
    """The names that a rank and its loaders have in shared memory.

    They are only needed until each loader has opened what they name. Later, nothing is left behind however the
    processes end, also if all of them are killed together, as by a batch system.
    """

    def __init__(self, loaders: int, names: Iterable[util.Finalize]) -> None:
        """Takes the number of loaders, and what was added to `named_semaphores()` as they started."""
        self._loaders = loaders
        self._names = names

    def taken(self, batches: int) -> None:
        """Removes the names once the number of batches that were taken shows that each loader has begun."""
        if 0 < self._loaders <= batches:
            remove_names(self._names)
            self._loaders = 0


@contextmanager
def explained_loader_deaths() -> Iterator[None]:
    """Explains the death of a loader, which torch raises wherever the main thread is at that moment.

    Raises: RunError instead of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if _TORCH_MESSAGE not in first_line:
            raise
        raise _death(first_line.rstrip(". ")) from error


@contextmanager
def explained_lost_loader() -> Iterator[None]:
    """Explains the death of a loader from which a batch is just taken, also if only the connection to it is lost.

    Raises: RunError instead of torch's RuntimeError or the connection's error.
    """
    try:
        with explained_loader_deaths():
            yield
    except (ConnectionError, EOFError) as error:
        with suppress(RuntimeError):  # torch raises this death once more, when the signal of it arrives
            time.sleep(_SECONDS_TO_SIGNAL)
        raise _death(f"the connection to it was lost ({type(error).__name__})") from error


def _death(how: str) -> RunError:
    return RunError(
        f"a process that loads batches has died: {how}. The kernel kills it when memory runs out, or someone did: look "
        "at `dmesg`, take fewer of them (training.loader_workers of a run, workers of a Loader), and start again"
    )
