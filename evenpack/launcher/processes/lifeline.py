"""A pipe through which a command notices that the process which started it has ended, however it ended."""

import fcntl
import os
import signal
import threading
from contextlib import suppress

_VARIABLE = "EVENPACK_LIFELINE"

_FIRST_FREE = 3
"""Lower descriptors are the standard streams of a started command, also where this process has closed its own."""

_has_ended = threading.Event()
"""Set with the signal that the end of the starter causes, until its handler asks."""


class Lifeline:
    """The starting process's end; the kernel closes it with the process."""

    def __init__(self) -> None:
        self._read, self._write = (_moved(end) for end in os.pipe())

    @property
    def environment(self) -> dict[str, str]:
        """The variable that a started command reads."""
        return {_VARIABLE: str(self._read)}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """The descriptor that a started command inherits."""
        return (self._read,)


def end_with_starter() -> None:
    """Sends this process a SIGTERM when the holder of its lifeline ends; without a lifeline it does nothing."""
    descriptor = os.environ.pop(_VARIABLE, "")  # it is not for the processes that this one starts
    if descriptor.isdecimal():
        with suppress(OSError):
            os.set_inheritable(int(descriptor), False)
            threading.Thread(target=_end_with, args=(int(descriptor),), name="lifeline", daemon=True).start()


def take_end_of_starter() -> bool:
    """Returns, in the handler of a SIGTERM, whether the end of the starter has caused it, and nobody's impatience."""
    was_set = _has_ended.is_set()
    _has_ended.clear()
    return was_set


def _end_with(descriptor: int) -> None:
    with suppress(OSError):
        os.read(descriptor, 1)
        _has_ended.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _moved(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return moved
