"""Stop requests to a run: signals to its ranks, a file that all of its machines see, or the end of a command's starter.

A first SIGINT, SIGTERM or SIGHUP requests a save at the end of the step. What means an immediate stop after a SIGINT
depends on who passes signals on: `deepspeed` makes a terminal's Ctrl-C a SIGTERM, so that a rank may get both for one
key; `torchrun` makes the second Ctrl-C one. Slurm signals a rank and its launcher, which passes that on: signals of one
moment are one request. A command of a study gets a SIGTERM when the study ends, however it ended. Output that nobody
takes any more is dropped, so that no save fails by it.
"""

import io
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpack.errors import EXIT_STOPPED
from evenpack.files import read_json_object, write_json
from evenpack.launch_environment import AGENT_STORE, MAX_RESTARTS
from evenpack.units import visible

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code that a shell reports for a command that Ctrl-C ended."""

SAME_REQUEST_SECONDS = 0.5
"""Signals within this time are one request: batch systems send several, and people who repeat Ctrl-C wait longer."""

_STOP_FILE = ".stop"


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """The content of `OUTPUT_DIR/.stop`."""

    run_id: str
    """Run that is to stop: a file of an earlier run has no effect."""
    at_once: bool
    """Whether to stop without saving."""
    before_first_step: bool = False
    """Whether a rank has ended already, because it had not met the others: none can save any more."""


def write_stop_request(output_dir: Path, request: StopRequest) -> None:
    """Asks every rank of the run to stop, wherever it is. Raises: OSError."""
    write_json(output_dir / _STOP_FILE, asdict(request))


def read_stop_request(output_dir: Path, run_id: str) -> StopRequest | None:
    """Returns the request to this run, if any."""
    values = read_json_object(output_dir / _STOP_FILE) or {}
    if values.get("run_id") != run_id:
        return None
    early = bool(values.get("before_first_step"))
    return StopRequest(run_id=run_id, at_once=bool(values.get("at_once")), before_first_step=early)


def remove_stop_request(output_dir: Path) -> None:
    """Removes an earlier request for a new run."""
    (output_dir / _STOP_FILE).unlink(missing_ok=True)


class StopFlag:
    """Whether this process has been asked to stop. Set by signals, the guard, or both; never unset."""

    def __init__(self) -> None:
        self._requested = False
        self._interrupted_at: float | None = None

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
        if self._interrupted_at is not None:
            is_later = time.monotonic() - self._interrupted_at > SAME_REQUEST_SECONDS
            if is_later and (number == signal.SIGINT or (number == signal.SIGTERM and AGENT_STORE in os.environ)):
                os._exit(EXIT_INTERRUPTED)
        elif number == signal.SIGINT:
            self._interrupted_at = time.monotonic()


def stopped_exit_code() -> int:
    """Returns the exit code of a rank that was asked to stop and has saved, or has nothing to save yet.

    `torchrun --max-restarts` takes each code but 0 for a failure, and would start the ranks again.
    """
    return 0 if MAX_RESTARTS.read(os.environ) else EXIT_STOPPED


Handler = Callable[[int, types.FrameType | None], None]


def on_stop_signals(handler: Handler) -> dict[int, Any]:
    """Sets `handler` on `STOP_SIGNALS` and returns the previous handlers.

    A signal that the parent process has set to be ignored stays ignored: `nohup` does that with SIGHUP, and a shell
    script with SIGINT for background processes.
    """
    caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in caught}


@contextmanager
def handled_stop_signals(handler: Handler) -> Iterator[None]:
    """Sets `handler` on `STOP_SIGNALS` within the block, as `on_stop_signals` does."""
    before = on_stop_signals(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_STARTER = "EVENPACK_STARTER"
"""Variable of a command that a study starts: the study's process."""

_STARTER_SECONDS = 1.0
"""Seconds between two looks at whether it lives."""


_starter_has_ended = threading.Event()
"""Set with the signal that the end of the starter causes, until its handler asks."""


def named_as_starter() -> dict[str, str]:
    """Returns the variable of the commands that end with this process, whose children they are."""
    return {_STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """Sends this process a SIGTERM when the process that is named as its starter ends; without one it does nothing."""
    starter = os.environ.pop(_STARTER, None)  # it is not for the processes that this one starts
    if starter is not None:
        threading.Thread(target=_end_with, args=(int(starter),), name="starter", daemon=True).start()


def take_end_of_starter() -> bool:
    """Returns, in the handler of a SIGTERM, whether the end of the starter has caused it, and not a user."""
    was_set = _starter_has_ended.is_set()
    _starter_has_ended.clear()
    return was_set


def _end_with(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_STARTER_SECONDS)
    _starter_has_ended.set()
    os.kill(os.getpid(), signal.SIGTERM)


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


def open_closed_streams() -> None:
    """Opens the null device in place of standard streams with which this process was started closed.

    Python has no object for these, and the next file that is opened would get the number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def survive_readers() -> None:
    """Makes `sys.stdout` and `sys.stderr` survive a terminal, a reader or a disk that takes no more."""
    open_closed_streams()
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
    print(visible(message), file=sys.stderr, flush=True)
