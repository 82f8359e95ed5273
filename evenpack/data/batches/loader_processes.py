"""What a process that loads batches does differently from others: its signals, and what it says at its end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

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
    second SIGTERM ends it, which is how torch ends loaders that do not exit.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    sys.excepthook = _say_nothing_of_lost_connections


def _say_nothing_of_lost_connections(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints uncaught errors, but not that the rank has gone which was about to take a batch.

    multiprocessing's thread that hands memory over calls this when its rank is killed; others explain that.
    """
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
