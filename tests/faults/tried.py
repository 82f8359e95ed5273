"""A fault that was tried, and what is promised of it."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from evenpack.errors import EXIT_STOPPED
from faults.life import End, Life
from faults.subject import Case, SubjectRun

Outcome = Literal["went on", "ended clearly", "lost"]


class MissedError(Exception):
    """The run ended, or had nothing to break, before the fault."""


class BrokenError(Exception):
    """The promise is broken: the message says how."""


class OtherResultError(BrokenError):
    """A run has computed something else than the undisturbed one: any of its faults may be the cause."""


@dataclass(kw_only=True)
class Tried:
    """One fault."""

    name: str
    where: str
    """How the run was started, and the moment."""
    detail: str
    outcome: Outcome = "lost"
    seconds: float | None = None
    """From the fault to the end of every process."""
    problem: str = ""
    """What was not as promised."""
    said: str = ""
    """The last words of the run."""

    def __str__(self) -> str:
        ended = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        problem = f": {self.problem}" if self.problem else ""
        return f"{self.name} ({self.where}; {self.detail}): {self.outcome}{ended}{problem}"


def require_clear(end: End, case: Case, *, silent: bool, may_return_0: bool = False) -> None:
    """Raises: BrokenError unless a run ended with another code than 0, a message, and no process left.

    Args:
        silent: whether the process that would have said something was killed.
        may_return_0: whether the code is not evenpack's affair.
    """
    if end.orphans:
        raise BrokenError(f"processes lived on: {'; '.join(end.orphans)}")
    if end.exit_code == 0 and not may_return_0:
        raise BrokenError("the run ended with 0 before its last step")
    if not silent and not end.said.strip():
        raise BrokenError(f"the run ended with {end.exit_code} and said nothing")
    if has_traceback(end.said):
        raise BrokenError(f"a traceback instead of a message: {end.said[-2000:]}")


def require_said(end: End, pattern: str | None) -> None:
    """Raises: BrokenError unless a run said as it ended what a regular expression matches, if there is one."""
    if pattern is not None and re.search(pattern, end.said) is None:
        raise BrokenError(f"the message does not say {pattern}: {end.said[-800:]}")


def require_nothing_left(life: Life) -> None:
    """Raises: BrokenError unless a run that has ended left only files, in its own folders."""
    left = life.left_behind()
    if left:
        raise BrokenError(f"left behind: {', '.join(left)}")


def require_saved(run: SubjectRun, tried: Tried, *, exit_code: int, step: int) -> None:
    """Raises: BrokenError unless a run that was asked to stop after a step has saved, and says so by its code."""
    if exit_code != EXIT_STOPPED or run.last_saved() < step:
        tried.outcome = "lost"
        raise BrokenError(
            f"asked to stop at step {step}, the run ended with {exit_code}, and its last checkpoint is of "
            f"{run.last_saved()}"
        )


_UNBORN = re.compile(r"^Traceback .*\n(?: .*\n)* .* in spawn_main\n(?: .*\n)*EOFError: Ran out of input$", re.MULTILINE)
"""What Python prints in a process whose parent is killed as it starts it: no line of evenpack has run there yet."""


_OF_SHARED_MEMORY = re.compile(
    r"^Traceback .*\n(?: .*\n)* .*/resource_sharer\.py.*\n(?: .*\n)*(?:EOFError|ConnectionResetError).*$",
    re.MULTILINE,
)
"""What a thread of Python prints in a loader's process as the rank that takes its batch is killed."""

_OF_TORCHRUN = re.compile(
    r"^Traceback .*\n(?: .*\n)*torch\.distributed\.elastic\.multiprocessing\.\S*(?:ChildFailedError|SignalException):",
    re.MULTILINE,
)
"""What torchrun prints itself when a rank has failed, or when it is asked to stop."""

_OF_DEEPSPEED = re.compile(
    r"^Traceback .*\n(?: .*\n)* .*deepspeed/launcher/runner\.py.*\n(?: .*\n)*KeyboardInterrupt$", re.MULTILINE
)
"""What `deepspeed` prints itself at a Ctrl-C, while the ranks save."""

_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: )?Traceback", re.MULTILINE)
"""With a prefix where torch has a process group."""


def has_traceback(said: str) -> bool:
    """Returns whether a rank, or a launcher of evenpack, ended with one.

    What Python ignores as it ends is not counted, nor what it prints in a process that has not begun.
    """
    for allowed in (_UNBORN, _OF_SHARED_MEMORY, _OF_TORCHRUN, _OF_DEEPSPEED):
        said = allowed.sub("", said)
    ignored = re.findall("^Exception ignored in", said, re.MULTILINE)
    return len(_TRACEBACK.findall(said)) > len(ignored)


def write_tried(path: Path, tried: list[Tried]) -> None:
    """Writes the faults, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in tried))
