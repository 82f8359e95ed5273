"""Stop requests to a run: signals to its ranks, or a file that all of its machines see.

A first SIGINT, SIGTERM or SIGHUP requests a save at the end of the step. `deepspeed` passes a terminal's Ctrl-C on as a
SIGTERM, so that a rank may get both for one key: only a second SIGINT means an immediate stop.
"""

import os
import signal
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpack.files import read_json_object, write_json

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code that a shell reports for a command that Ctrl-C ended."""

_STOP_FILE = ".stop"


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """The content of `OUTPUT_DIR/.stop`."""

    run_id: str
    """Run that is to stop: a file of an earlier run has no effect."""
    at_once: bool
    """Whether to stop without saving."""


def write_stop_request(output_dir: Path, request: StopRequest) -> Path:
    """Asks every rank of the run to stop, wherever it is; returns the file. Raises: OSError."""
    write_json(output_dir / _STOP_FILE, asdict(request))
    return output_dir / _STOP_FILE


def read_stop_request(output_dir: Path, run_id: str) -> StopRequest | None:
    """Returns the request to this run, if any."""
    values = read_json_object(output_dir / _STOP_FILE) or {}
    return StopRequest(run_id=run_id, at_once=bool(values.get("at_once"))) if values.get("run_id") == run_id else None


def remove_stop_request(output_dir: Path) -> None:
    """Removes an earlier request for a new run."""
    (output_dir / _STOP_FILE).unlink(missing_ok=True)


class StopFlag:
    """Whether this process has been asked to stop. Set by signals, the guard, or both; never unset."""

    def __init__(self) -> None:
        self._requested = False
        self._interrupts = 0

    def is_set(self) -> bool:
        """Returns the flag, for `stop_requested` of the training loop; costs nothing."""
        return self._requested

    def set(self) -> None:
        """Requests a stop at the end of the step."""
        self._requested = True

    def install(self) -> None:
        """Sets the flag on `STOP_SIGNALS`."""
        on_stop_signals(self._handle)

    def _handle(self, number: int, _frame: types.FrameType | None) -> None:
        self._requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(EXIT_INTERRUPTED)


SignalHandler = Callable[[int, types.FrameType | None], Any] | int | None
"""The type that `signal.signal` takes and returns."""


def on_stop_signals(handler: Callable[[int, types.FrameType | None], None]) -> dict[int, SignalHandler]:
    """Sets `handler` on `STOP_SIGNALS` and returns the previous handlers.

    A signal that the parent process has set to be ignored stays ignored: `nohup` does that with SIGHUP, and a shell
    script with SIGINT for background processes.
    """
    before: dict[int, SignalHandler] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before
