"""The status of each rank in `OUTPUT_DIR/ranks`, and the first failure.

Through these files `evenpack train`, on one machine, learns how the processes ended that `deepspeed` started on any
machine that shares the folder. A run id in each file distinguishes it from those of an earlier run.
"""

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil

from evenpack.errors import RunError
from evenpack.files import read_json_object, write_json, write_text_once
from evenpack.launch_environment import LOCAL_RANK, LOCAL_WORLD_SIZE, MACHINE, RANK, WORLD_SIZE, check_ranks
from evenpack.launcher.processes.deepspeed_launcher import first_rank_of_machine
from evenpack.launcher.processes.output_lock import is_held

_OF_A_RUN = ("rank_*.json", "failure_*.json", "refused_*", "heartbeat_*", "stack_*.txt", "roll_call_*", "present_*")
_RANK_FILE = re.compile(r"rank_(\d+)\.json")


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

    @property
    def spans_machines(self) -> bool:
        """Whether some of the ranks are on other machines."""
        return self.launched and self.local_world_size < self.world_size

    def local_ranks(self) -> range:
        """Returns the ranks on this machine, which launchers number consecutively unless they are told otherwise."""
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


State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The status of a rank in `OUTPUT_DIR/ranks/rank_N.json`."""

    run_id: str
    rank: int
    world_size: int
    host: str
    process: ProcessIdentity
    started: float
    """Seconds since 1970."""
    state: State
    step: int | None
    """The last completed step; None until the rank has ended."""
    error: str | None
    exit_code: int | None

    @classmethod
    def starting(cls, run_id: str, place: RankPlace) -> "RankStatus":
        """Returns the status of this process at its start."""
        return cls(
            run_id=run_id,
            rank=place.rank,
            world_size=place.world_size,
            host=socket.gethostname(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
            started=time.time(),
            state="running",
            step=None,
            error=None,
            exit_code=None,
        )

    def ended(self, state: State, *, exit_code: int, step: int | None = None, error: str | None = None) -> "RankStatus":
        """Returns the rank's final status."""
        return replace(self, state=state, step=step, error=error, exit_code=exit_code)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failed rank in `OUTPUT_DIR/ranks/failure.json`. The first rank writes it, later ones cannot."""

    run_id: str
    rank: int
    host: str
    error: str | None
    """Error; None: it exited without an error message, and a neighbour writes this for it."""
    exit_code: int | None
    at: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, status: RankStatus) -> "Failure":
        """Returns the failure of a rank that could still report it."""
        return cls(
            run_id=status.run_id,
            rank=status.rank,
            host=status.host,
            error=status.error,
            exit_code=status.exit_code,
            at=time.time(),
        )

    def describe(self) -> str:
        """Returns a clause for messages."""
        how = f"failed: {self.error}" if self.error is not None else "exited without an error message"
        return f"rank {self.rank} on {self.host} {how}"


class RankFolder:
    """`OUTPUT_DIR/ranks` of one run."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self.path = output_dir / "ranks"
        self.run_id = run_id

    def write_status(self, status: RankStatus) -> None:
        """Writes a status; a final one not over that of a later run. Raises: OSError."""
        if status.state != "running" and self.owner_of(status.rank) not in (self.run_id, None):
            return
        write_json(self._status_file(status.rank), asdict(status))

    def owner_of(self, rank: int) -> str | None:
        """Returns the id of the run that has written the status of a rank; None if there is no status."""
        owner = (read_json_object(self._status_file(rank)) or {}).get("run_id")
        return owner if isinstance(owner, str) else None

    def read_status(self, rank: int) -> RankStatus | None:
        """Returns a rank's status; None if it has not written any in this run."""
        values = self._read(self._status_file(rank))
        with suppress(KeyError, TypeError):  # a file of another program
            return RankStatus(**{**values, "process": ProcessIdentity(**values["process"])})
        return None

    def read_statuses(self) -> dict[int, RankStatus]:
        """Returns the statuses by rank, only those of this run."""
        names = (_RANK_FILE.fullmatch(path.name) for path in self.path.glob("rank_*.json"))
        found = (self.read_status(int(name[1])) for name in names if name)
        return {status.rank: status for status in sorted(filter(None, found), key=lambda status: status.rank)}

    def claim_failure(self, failure: Failure) -> Failure:
        """Makes `failure` the first of this run, unless another was earlier; returns the first."""
        write_text_once(self._failure_file, json.dumps(asdict(failure)))
        return self.read_failure() or failure

    def read_failure(self) -> Failure | None:
        """Returns the first failure; None while no rank of this run has failed."""
        with suppress(TypeError):
            return Failure(**self._read(self._failure_file))
        return None

    def refuse(self) -> None:
        """Notes that the folder is another run's, for the other ranks of this one. Raises: OSError."""
        self._refusal_file.touch()

    def is_refused(self) -> bool:
        """Returns whether rank 0 has noted that the folder is another run's."""
        return self._refusal_file.exists()

    def refresh(self) -> None:
        """Makes a network file system look for new files: it remembers for a minute that a file did not exist."""
        with suppress(OSError):
            os.close(os.open(self.path, os.O_RDONLY))

    def remove_earlier(self) -> None:
        """Removes the files of earlier runs, and makes the folder; for the owner of the output directory.

        Raises: RunError if a file cannot be removed, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror}") from error
        for path in chain.from_iterable(map(self.path.glob, _OF_A_RUN)):
            if not self._read(path) and not path.name.endswith(self.run_id):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise RunError(f"{path} is in the way and cannot be removed: {error.strerror}") from error

    def _read(self, path: Path) -> dict[str, Any]:
        """Returns the content of a file; empty if it is not of this run."""
        values = read_json_object(path) or {}
        return values if values.get("run_id") == self.run_id else {}

    def _status_file(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.json"

    @property
    def _refusal_file(self) -> Path:
        return self.path / f"refused_{self.run_id}"

    @property
    def _failure_file(self) -> Path:
        return self.path / f"failure_{self.run_id}.json"


def plain_run_id(place: RankPlace) -> str:
    """Returns a run id for a rank of one machine that `evenpack train` has not started: one for all of a launcher."""
    if place.launched:
        with suppress(psutil.Error):
            parent = psutil.Process(os.getppid())
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun stays, and starts the ranks again
            return f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.0f}-{restart}"
    return uuid.uuid4().hex


def output_dir_of_first(run_id: str) -> Path | None:
    """Returns the output directory into which rank 0 of this start writes, if it is a process of the same launcher.

    It has the lock of its directory open, and has written its status there.
    """
    with suppress(psutil.Error, OSError):
        for sibling in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error, OSError):
                locks = [Path(file.path) for file in sibling.open_files() if file.path.endswith("/.lock")]
                found = [lock.parent for lock in locks if RankFolder(lock.parent, run_id).read_status(0) is not None]
                if found:
                    return found[0]
    return None


def running_run(output_dir: Path) -> str:
    """Returns the id of the run that goes on in a directory, on any machine.

    A run that was killed could not say so: nobody holds its lock then, and on this machine its process is gone too.
    The process is looked for as well, because a file system without locks shows none.

    Raises: RunError if its rank 0 has ended, or there is none.
    """
    run_id = (read_json_object(output_dir / "ranks" / "rank_0.json") or {}).get("run_id")
    status = RankFolder(output_dir, run_id).read_status(0) if isinstance(run_id, str) else None
    if status is None or status.state != "running":
        raise RunError(f"no run is going on in {output_dir}: its rank 0 has ended, or has not started yet")
    if status.host == socket.gethostname() and not status.process.is_alive() and not is_held(output_dir):
        raise RunError(f"no run is going on in {output_dir}: its rank 0 (process {status.process.pid}) was killed")
    return status.run_id
