"""What each rank of a run says about itself in `OUTPUT_DIR/ranks`, and who failed first.

The files are how `evenpack train`, on one machine, learns the fate of processes that `deepspeed` started, on any
machine that shares the folder. A run id in each of them tells this run's files from those of an earlier one.
"""

import fcntl
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from evenpack.errors import RunError
from evenpack.files import read_json_object, write_json, write_text_once

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK_NAMES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_WORLD_NAMES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""torchrun's names first, then `deepspeed`'s, Open MPI's and those of the MPICH family."""

_RANK_FILE = re.compile(r"rank_(\d+)\.json")

_LOCK_SECONDS = 15.0
"""How long a new run waits for the ranks of a killed one to notice and end."""


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process of this machine; the session tells it from a later one with the same pid, without any clock."""

    pid: int
    session: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """None if there is no such process."""
        try:
            return cls(pid=pid, session=os.getsid(pid))
        except OSError:
            return None

    def is_alive(self) -> bool:
        """False also for a zombie, which has ended and waits for its parent to ask."""
        if self.of(self.pid) != self:
            return False
        try:
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """This process among the ranks, as whoever started it has put it into the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool
    """Whether a launcher (deepspeed, torchrun, mpirun) started it; else it is alone."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "RankPlace":
        def number(names: tuple[str, ...], otherwise: int) -> int:
            return next((int(environment[name]) for name in names if name in environment), otherwise)

        return cls(
            rank=number(_RANK_NAMES, 0),
            world_size=number(_WORLD_NAMES, 1),
            local_rank=number(_LOCAL_RANK_NAMES, 0),
            local_world_size=number(_LOCAL_WORLD_NAMES, 1),
            launched=any(name in environment for name in _RANK_NAMES),
        )

    def local_ranks(self) -> range:
        """The ranks on this machine: every launcher numbers them one after another."""
        first = self.rank - self.local_rank
        return range(first, min(first + self.local_world_size, self.world_size))


@dataclass(frozen=True, kw_only=True)
class LaunchToken:
    """The `evenpack train` that started a rank, as it travels on the command line, which reaches every machine."""

    host: str
    process: ProcessIdentity
    run_id: str

    @classmethod
    def of_this_process(cls) -> "LaunchToken":
        return cls(
            host=socket.gethostname(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
            run_id=uuid.uuid4().hex,
        )

    @classmethod
    def parse(cls, text: str) -> "LaunchToken":
        """Raises: ValueError."""
        run_id, pid, session, host = text.split(":", 3)
        return cls(host=host, process=ProcessIdentity(pid=int(pid), session=int(session)), run_id=run_id)

    def __str__(self) -> str:
        return f"{self.run_id}:{self.process.pid}:{self.process.session}:{self.host}"


State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """`OUTPUT_DIR/ranks/rank_N.json`."""

    run_id: str
    rank: int
    world_size: int
    host: str
    process: ProcessIdentity
    started: float
    """Seconds since 1970."""
    state: State
    step: int | None
    """The last step done; None until the rank has ended."""
    error: str | None
    exit_code: int | None

    @classmethod
    def starting(cls, run_id: str, place: RankPlace) -> "RankStatus":
        """This process, now."""
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
        """The rank's last word."""
        return replace(self, state=state, step=step, error=error, exit_code=exit_code)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`OUTPUT_DIR/ranks/failure.json`: the rank that failed first. Who comes first writes it, later ones cannot."""

    run_id: str
    rank: int
    host: str
    error: str | None
    """None: it exited without an error message, and a neighbour writes this for it."""
    exit_code: int | None
    at: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, status: RankStatus) -> "Failure":
        """A rank that could still say why."""
        return cls(
            run_id=status.run_id,
            rank=status.rank,
            host=status.host,
            error=status.error,
            exit_code=status.exit_code,
            at=time.time(),
        )

    def describe(self) -> str:
        """A clause for messages."""
        how = f"failed: {self.error}" if self.error is not None else "exited without an error message"
        return f"rank {self.rank} on {self.host} {how}"


class RankFolder:
    """`OUTPUT_DIR/ranks` of one run."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self.path = output_dir / "ranks"
        self._run_id = run_id

    def write_status(self, status: RankStatus) -> None:
        """Raises: OSError."""
        write_json(self._status_file(status.rank), asdict(status))

    def read_status(self, rank: int) -> RankStatus | None:
        """None if this rank has not said anything in this run."""
        values = self._read(self._status_file(rank))
        with suppress(KeyError, TypeError):  # a file of somebody else's making
            return RankStatus(**{**values, "process": ProcessIdentity(**values["process"])})
        return None

    def read_statuses(self) -> dict[int, RankStatus]:
        """By rank; only this run's."""
        names = (_RANK_FILE.fullmatch(path.name) for path in self.path.glob("rank_*.json"))
        found = (self.read_status(int(name[1])) for name in names if name)
        return {status.rank: status for status in sorted(filter(None, found), key=lambda status: status.rank)}

    def claim_failure(self, failure: Failure) -> Failure:
        """Makes `failure` the first of this run, unless another was faster; returns the first."""
        write_text_once(self._failure_file, json.dumps(asdict(failure)))
        return self.read_failure() or failure

    def read_failure(self) -> Failure | None:
        """None while no rank of this run has failed."""
        with suppress(TypeError):
            return Failure(**self._read(self._failure_file))
        return None

    def remove_earlier(self) -> None:
        """Removes what earlier runs have left, and makes the folder; for the one that holds the output directory.

        Raises: RunError if it cannot be removed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for path in [*self.path.glob("rank_*.json"), *self.path.glob("failure_*.json")]:
            if not self._read(path):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise RunError(f"{path} is in the way and cannot be removed: {error.strerror}") from error

    def _read(self, path: Path) -> dict[str, Any]:
        """Empty if there is nothing of this run."""
        values = read_json_object(path) or {}
        return values if values.get("run_id") == self._run_id else {}

    def _status_file(self, rank: int) -> Path:
        return self.path / f"rank_{rank}.json"

    @property
    def _failure_file(self) -> Path:
        return self.path / f"failure_{self._run_id}.json"


@contextmanager
def held_output_dir(output_dir: Path, *, patience_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Holds the output directory for one run; the kernel lets go of it however the process ends.

    Raises: RunError if another run holds it, or it cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / ".lock").open("a")
    except OSError as error:
        raise RunError(f"run.output_dir {output_dir} cannot be written: {error.strerror}") from error
    deadline = time.monotonic() + patience_seconds
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"another run is writing into {output_dir}: wait for its end, or give this one a "
                        "run.output_dir of its own"
                    ) from None
            except OSError:
                break  # a file system without locks: nothing can be known here
            time.sleep(0.2)
        yield


def plain_run_id(place: RankPlace) -> str:
    """A run id for a rank that `evenpack train` has not started: one for all children of a launcher."""
    if place.launched:
        with suppress(psutil.Error):
            parent = psutil.Process(os.getppid())
            return f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.0f}"
    return uuid.uuid4().hex
