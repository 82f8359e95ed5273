"""Runs one packer in a process of its own, and measures its memory from outside.

CPU seconds are those of the process and its children while it packs. Memory is the largest anonymous resident set while
it packs (sampled every two milliseconds), minus that of the process after its imports, a small packing and the
construction of its input. Linux only: it reads /proc.
"""

import gc
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from task import Attempt, Packed, Task, TaskName

WARM_UP_SEQUENCES = 1000
"""Sequences that are packed before the clock starts, so that imports and compilers are not counted."""

_POLL_SECONDS = 0.002


class OverTimeError(Exception):
    """The packer was stopped at the limit of time."""


class PackerFailedError(Exception):
    """The packer raised, crashed, or packed wrongly."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one run whose packs were checked."""

    sequences: int
    tokens: int
    packs: int
    least_packs: int
    pack_length: int
    deepest: int
    holds: str
    cpu_seconds: float
    peak_megabytes: float

    @property
    def over_percent(self) -> float:
        return (self.packs / self.least_packs - 1) * 100

    @property
    def efficiency_percent(self) -> float:
        return self.tokens / (self.packs * self.pack_length) * 100


def measure(load: Callable[[Task], Attempt], name: TaskName, *, limit_seconds: float) -> Measured:
    """Runs the packer. Raises: OverTimeError after `limit_seconds` of packing or of setup; PackerFailedError."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(load, name, there))
    process.start()
    there.close()
    try:
        baseline = _answer(here, limit_seconds)
        peak = baseline
        until = time.monotonic() + limit_seconds
        while not here.poll(_POLL_SECONDS):
            if time.monotonic() > until:
                raise OverTimeError(f"more than {limit_seconds:.0f} s")
            peak = max(peak, anonymous_bytes(process.pid) or 0)
        cpu_seconds, at_end = _answer(here, limit_seconds)
        figures = _answer(here, limit_seconds)
    finally:
        process.kill()
        process.join()
        here.close()
    return Measured(cpu_seconds=cpu_seconds, peak_megabytes=(max(peak, at_end) - baseline) / 1e6, **figures)


def _answer(connection: Connection, limit_seconds: float) -> Any:
    if not connection.poll(limit_seconds):
        raise OverTimeError(f"more than {limit_seconds:.0f} s beside packing")
    try:
        answer = connection.recv()
    except EOFError:
        raise PackerFailedError("the process died; perhaps without memory") from None
    if isinstance(answer, BaseException):
        raise PackerFailedError(str(answer))
    return answer


def _child(load: Callable[[Task], Attempt], name: TaskName, connection: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        _pack_and_tell(load, name.build(), connection)
    except BaseException as error:  # sent to the parent, which names the packer
        connection.send(PackerFailedError(f"{traceback.format_exception_only(error)[-1].strip()}"))


def _pack_and_tell(load: Callable[[Task], Attempt], task: Task, connection: Connection) -> None:
    small = task.start(WARM_UP_SEQUENCES)
    warm_up = load(small)
    warm_up.read(warm_up.run()).check(small)
    attempt = load(task)
    del warm_up
    gc.collect()
    connection.send(anonymous_bytes(os.getpid()))
    before = _cpu_seconds()
    native = attempt.run()
    cpu_seconds = _cpu_seconds() - before
    connection.send((cpu_seconds, anonymous_bytes(os.getpid())))
    packed = attempt.read(native)
    packed.check(task)
    connection.send(_figures(task, packed))


def _figures(task: Task, packed: Packed) -> dict[str, int | str]:
    return {
        "sequences": len(task.lengths),
        "tokens": int(task.lengths.sum()),
        "packs": len(packed.sizes),
        "least_packs": task.least_packs,
        "pack_length": task.pack_length,
        "deepest": int(packed.sizes.max()),
        "holds": packed.holds,
    }


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def anonymous_bytes(process_id: int | None) -> int | None:
    """Returns the anonymous resident set of a process; None if it has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
