"""The end of a process without the interpreter's teardown, which takes torch's modules most of a second."""

import atexit
import os
import sys
from contextlib import suppress


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
