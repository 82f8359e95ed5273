"""Standard output and error that survive whoever reads them."""

import io
import sys
from contextlib import suppress
from typing import Any


class LastingFile(io.FileIO):
    """A terminal, pipe or file; what it does not take is discarded.

    A terminal may be closed (a lost connection), the reader of a pipe end (a Ctrl-C ends `tee` too), a disk be full.
    Otherwise the next progress line would end the run, perhaps just as it has been asked to save its state.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def survive_readers() -> None:
    """Makes `sys.stdout` and `sys.stderr` survive a terminal, a reader or a disk that takes no more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError):  # it has no descriptor
            descriptor = stream.fileno()  # kept: others write to it by its number
            stream.flush()
            setattr(sys, name, _lasting_text(descriptor, stream.encoding))


def _lasting_text(descriptor: int, encoding: str) -> io.TextIOWrapper:
    raw = LastingFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="replace", line_buffering=True)


def say(message: str) -> None:
    """Prints one line to standard error, without buffering."""
    print(message, file=sys.stderr, flush=True)
