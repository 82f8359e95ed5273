"""What a run has on its machine besides its files: processes, ports, names in shared memory, temporary files."""

import re
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(r" (\d+) +/dev/shm/", re.MULTILINE)
_OF_OTHERS = ("torchelastic_", "torchinductor_")
"""Temporary files that launchers leave when they are killed, and the cache of torch, which is to stay."""
_SECONDS = 60.0
"""Seconds for a resource tracker to remove what it has tracked, after the last process, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What is there at one moment."""

    shared: frozenset[str] = frozenset()
    """Names in shared memory that processes of the run had mapped, and no living process has."""
    ports: frozenset[str] = frozenset()
    """Ports at which a process of the run listens."""
    temporary: frozenset[str] = frozenset()
    """Files in the folder for the run's temporary ones."""
    processes: frozenset[str] = frozenset()
    """Processes of the run."""

    @classmethod
    def now(cls, temporary: Path, processes: Sequence[psutil.Process], names: Set[str]) -> "Traces":
        """Looks; `temporary` is the TMPDIR of the run with these processes, which have mapped the `names`, or had."""
        return cls(
            shared=frozenset(_unused(names)),
            ports=_ports({one.pid for one in processes}),
            temporary=frozenset(path.name for path in temporary.glob("*") if not path.name.startswith(_OF_OTHERS)),
            processes=frozenset(map(described, processes)),
        )

    def beyond(self, before: "Traces") -> list[str]:
        """Returns what is here and was not before, in words."""
        return [
            f"{kind} {name}"
            for kind in ("shared", "ports", "temporary", "processes")
            for name in sorted(getattr(self, kind) - getattr(before, kind))
        ]


def left_behind(
    before: Traces, look: Callable[[], Traces], *, but: str | None = None, seconds: float = _SECONDS
) -> list[str]:
    """Returns what is there still after a little while and was not before, without temporary files named `but`..."""
    deadline = time.monotonic() + seconds
    while True:
        left = [one for one in look().beyond(before) if but is None or not one.startswith(f"temporary {but}")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def mapped_names(processes: Iterable[psutil.Process]) -> set[str]:
    """Returns the names in shared memory of what processes have mapped.

    They are found by their inodes: a process that has made a semaphore has mapped it by another name.
    """
    mapped: set[int] = set()
    for process in processes:
        with suppress(OSError, UnicodeDecodeError):
            mapped |= set(map(int, _MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text())))
    return {name for name, inode in _inodes().items() if inode in mapped}


def _inodes() -> dict[str, int]:
    found = {}
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            found[path.name] = path.stat().st_ino
    return found


def _unused(names: Set[str]) -> set[str]:
    there = _inodes().keys() & names
    return there - mapped_names(psutil.process_iter()) if there else there


def _ports(owners: set[int]) -> frozenset[str]:
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return frozenset(f"{one.laddr.ip}:{one.laddr.port}" for one in listening if one.pid in owners)


def described(process: psutil.Process) -> str:
    """Returns pid and command of a process, which may end meanwhile."""
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline()[:6])}"
    return str(process.pid)
