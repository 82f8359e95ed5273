"""Who is who in a run: processes, the `evenpack train` that started them, and the place of a rank among all."""

import base64
import binascii
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from evenpack.launch_environment import LOCAL_RANK, LOCAL_WORLD_SIZE, MACHINE, RANK, WORLD_SIZE, check_ranks

_MODULE = "deepspeed.launcher.launch"


def parent_command() -> list[str]:
    """Returns the command line of this process's parent; empty if it cannot be read."""
    with suppress(psutil.Error):
        return list(psutil.Process(os.getppid()).cmdline())
    return []


def is_deepspeed_launcher(command: Sequence[str]) -> bool:
    """Returns whether a command starts the ranks of one machine for `deepspeed`."""
    return _MODULE in command


def first_rank_of_machine(command: Sequence[str], machine: int) -> int | None:
    """Returns the lowest rank of a machine, by its number in the hostfile; None if the command does not say it.

    It cannot be computed from LOCAL_RANK: DeepSpeed 0.19 sets it to the rank modulo the ranks of the machine, which
    begins with another number than 0 where machines have unequal slots.
    """
    if not is_deepspeed_launcher(command):
        return None
    for word in command:
        option, _, value = word.partition("=")
        if option == "--world_info":
            with suppress(binascii.Error, ValueError, TypeError, AttributeError):
                slots = [len(devices) for devices in json.loads(base64.urlsafe_b64decode(value)).values()]
                return sum(slots[:machine])
    return None


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process of this machine; the session distinguishes it from a later one with the same pid, without any clock."""

    pid: int
    session: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Returns the identity of a process; None if it does not exist."""
        try:
            return cls(pid=pid, session=os.getsid(pid))
        except OSError:
            return None

    def is_alive(self) -> bool:
        """Returns whether the process runs; False also for a zombie, which has ended and waits for its parent."""
        if self.of(self.pid) != self:
            return False
        try:
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """This process's place among the ranks, as the launcher wrote it into the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool
    """Whether a launcher (deepspeed, torchrun, mpirun) started it; otherwise it is alone."""
    first_of_machine: int
    """The lowest rank of this machine."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], launcher: Sequence[str] = ()) -> "RankPlace":
        """Returns the place that the environment names; `launcher`: the command line of the parent process.

        Raises: ConfigError naming a variable that is wrong.
        """
        check_ranks(environment)
        rank, local_rank = RANK.read(environment) or 0, LOCAL_RANK.read(environment) or 0
        first = first_rank_of_machine(launcher, MACHINE.read(environment) or 0)
        return cls(
            rank=rank,
            world_size=WORLD_SIZE.read(environment) or 1,
            local_rank=local_rank,
            local_world_size=LOCAL_WORLD_SIZE.read(environment) or 1,
            launched=RANK.found_in(environment) is not None,
            first_of_machine=rank - local_rank if first is None else first,
        )

    def local_ranks(self) -> range:
        """Returns the ranks on this machine, which launchers number consecutively by default."""
        return range(self.first_of_machine, min(self.first_of_machine + self.local_world_size, self.world_size))


@dataclass(frozen=True, kw_only=True)
class LaunchToken:
    """The `evenpack train` that started a rank, passed on the command line, which reaches every machine."""

    host: str
    machine: str
    """Distinguishes machines that have the same host name."""
    process: ProcessIdentity
    run_id: str

    @classmethod
    def of_this_process(cls) -> "LaunchToken":
        return cls(
            host=socket.gethostname(),
            machine=this_machine(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
            run_id=uuid.uuid4().hex,
        )

    @classmethod
    def parse(cls, text: str) -> "LaunchToken":
        """Parses the argument. Raises: ValueError."""
        run_id, pid, session, machine, host = text.split(":", 4)
        process = ProcessIdentity(pid=int(pid), session=int(session))
        return cls(host=host, machine=machine, process=process, run_id=run_id)

    def __str__(self) -> str:
        return f"{self.run_id}:{self.process.pid}:{self.process.session}:{self.machine}:{self.host}"

    def process_if_here(self) -> ProcessIdentity | None:
        """Returns the process if it is one of this machine."""
        return self.process if (self.host, self.machine) == (socket.gethostname(), this_machine()) else None


def this_machine() -> str:
    """Returns what distinguishes the processes of this machine, or container, from others of the same host name.

    That is the start of its kernel and the namespace of its process ids; empty where the kernel does not say them.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""
