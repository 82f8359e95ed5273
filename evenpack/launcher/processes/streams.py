"""Standard output and error that survive the end of the terminal."""

import errno
import io
import os
import sys
from typing import Any


class TerminalFile(io.FileIO):
    """A terminal; after it has been closed (a lost connection), output to it is discarded.

    Otherwise the next progress line would raise OSError in a run that has just been asked to save its state.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def survive_hang_up() -> None:
    """Makes `sys.stdout` and `sys.stderr` survive a hang-up; files and pipes are not changed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty():
            stream.flush()
            setattr(sys, name, _lasting_text(stream.fileno(), stream.encoding))


def _lasting_text(descriptor: int, encoding: str) -> io.TextIOWrapper:
    raw = TerminalFile(os.dup(descriptor), "w")
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="replace", line_buffering=True)


def say(message: str) -> None:
    """Prints one line to standard error, without buffering."""
    print(message, file=sys.stderr, flush=True)
