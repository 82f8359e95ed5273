"""How the ranks of a run report to each other: files in `OUTPUT_DIR/ranks`, and the directory's locks.

Through these files `evenpack train`, on one machine, learns how the processes ended that `deepspeed` started on any
machine that shares the folder. A run id in each file distinguishes it from files of an earlier run.
"""

import base64
import binascii
import fcntl
import json
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil

from evenpack.engine.activity import ACTIVITIES, START, Activity
from evenpack.engine.ownership import WRITER, owning
from evenpack.errors import RunError
from evenpack.files import explained, parse_json_object, read_json_object, write_text, write_text_once
from evenpack.launch_environment import LOCAL_RANK, LOCAL_WORLD_SIZE, MACHINE, RANK, WORLD_SIZE, check_ranks
from evenpack.launcher.processes.stop import say

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


_LOCK_SECONDS = 15.0
"""Seconds that a new run waits for the ranks of a killed one to notice and end."""

_LEASE_SECONDS = 120.0
"""The same for the lock of a rank on another machine: where that has lost power, a network file system keeps its locks
for a lease, 90 s in NFS 4."""

_ORPHAN_SECONDS = 3.0
"""Seconds in which a rank whose launcher is gone ends by itself, unless it is stopped."""


@contextmanager
def held_output_dir(
    output_dir: Path, *, patience_seconds: float = _LOCK_SECONDS, needs: Sequence["ProcessIdentity"] = ()
) -> Iterator[None]:
    """Locks the output directory for one run; the kernel releases the lock however the process ends.

    `needs`: processes without which this one ends by itself. A later start kills it if one of them has ended and it has
    not: it is stopped.

    Raises: RunError naming the process that has locked it, or if it cannot be written.
    """
    with _locked(output_dir / ".lock", patience_seconds, needs):
        yield


@contextmanager
def held_as_writer(
    output_dir: Path, *, patience_seconds: float = _LEASE_SECONDS, needs: Sequence["ProcessIdentity"] = ()
) -> Iterator[None]:
    """Makes this process, rank 0, the one that writes the run's files, until another one claims that.

    Arguments and errors are those of `held_output_dir`, whose lock `evenpack train` may hold instead of its ranks.
    """
    with _locked(output_dir / WRITER, patience_seconds, needs) as claim, owning(output_dir, claim):
        yield


@contextmanager
def _locked(path: Path, patience_seconds: float, needs: Sequence["ProcessIdentity"]) -> Iterator[bytes]:
    """Locks a file, which names its holder; yields what it says then, which nobody has written before."""
    if time.time() < 0:
        raise RunError("the clock of this machine stands before 1970: set it, then start the same command again")
    with explained(path.parent, action="written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    started = time.monotonic()
    try:
        while not _try_to_lock(descriptor):
            holder, waited = _Holder.read(path), time.monotonic() - started
            if holder is not None and waited > _ORPHAN_SECONDS:
                holder.end_orphan(path)
            if waited > patience_seconds:
                raise RunError(
                    f"another run is writing into {path.parent}{'' if holder is None else f': {holder}'}. Wait for its "
                    "end, or give this one a run.output_dir of its own"
                )
            time.sleep(0.2)
        claim = _Holder.this_process(needs).to_bytes()
        with explained(path, action="written"):
            os.pwrite(descriptor, claim, 0)  # in place, for which a full disk has room
            os.truncate(descriptor, len(claim))
        yield claim
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: `ownership.require_owned` must do
    return True


def is_held(output_dir: Path) -> bool:
    """Whether a run is writing into the directory now; False where its file system has no locks."""
    with suppress(OSError), (output_dir / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


_STATUS_BYTES = 4095

_UNFINISHED = tuple(f".{name}.*.partial" for name in ("run.json", "summary.json", "metrics.jsonl", "metrics.csv"))
"""Temporary names of files that rank 0 alone writes."""

_OF_A_RUN = (
    ".*.partial",
    "rank_*.json",
    "failure_*.json",
    "refused_*",
    "stack_*.txt",
    "lost_connection_*",
)
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


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """The process that has locked a file, as the file names it."""

    id: str
    """Of this locking."""
    host: str
    machine: str
    process: ProcessIdentity
    needs: tuple[ProcessIdentity, ...]

    @classmethod
    def this_process(cls, needs: Sequence[ProcessIdentity]) -> "_Holder":
        return cls(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=this_machine(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
            needs=tuple(needs),
        )

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> "_Holder | None":
        """Returns the holder; None while it has not said who it is."""
        values = read_json_object(path) or {}
        with suppress(KeyError, TypeError):
            process, *needs = (ProcessIdentity(**one) for one in (values["process"], *values["needs"]))
            return cls(**{**values, "process": process, "needs": tuple(needs)})
        return None

    def __str__(self) -> str:
        stopped = ""
        with suppress(psutil.Error):
            if self._is_here and psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED:
                stopped = f", which is stopped (kill -CONT {self.process.pid} wakes it, kill -9 ends it)"
        return f"process {self.process.pid} on {self.host}{stopped}"

    @property
    def _is_here(self) -> bool:
        return (self.host, self.machine) == (socket.gethostname(), this_machine())

    def end_orphan(self, path: Path) -> None:
        """Kills a rank of this machine that should have ended with its launcher, and still has the file open."""
        if not self._is_here or all(needed.is_alive() for needed in self.needs) or not self.process.is_alive():
            return
        with suppress(psutil.Error, OSError):
            if any(Path(file.path).samefile(path) for file in psutil.Process(self.process.pid).open_files()):
                say(f"ending process {self.process.pid}, a rank of an earlier start that has outlived its launcher")
                os.kill(self.process.pid, signal.SIGKILL)


State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank says of itself in `OUTPUT_DIR/ranks/rank_N.json`: who it is, what it does, how it has ended."""

    run_id: str
    rank: int
    host: str
    process: ProcessIdentity
    state: State
    step: int | None
    """The last completed step; None until the rank has ended."""
    error: str | None
    exit_code: int | None
    beats: int = 0
    """Heartbeats so far: the file changes with each, every few seconds while the rank lives."""
    place: tuple[int, Activity] = (0, "starting")
    """The step that it works on, 0 before the first, and what it does in it."""
    black_box: str | None = START
    """What it is in that does not tick; None if there is nothing of the kind."""
    still_seconds: float = 0.0
    """For how long it had begun or done nothing at its last heartbeat, by its own clock."""

    def order(self) -> tuple[int, int, bool]:
        """Returns step and activity, in the order in which every rank goes through them.

        Of ranks in the same place, one in a black box comes first: the others may wait for it.
        """
        step, activity = self.place
        return step, ACTIVITIES.index(activity), self.black_box is None

    def describe(self) -> str:
        """Returns step and activity in words."""
        step, activity = self.place
        return f"step {step}, {activity}" + (f" ({self.black_box})" if self.black_box else "")

    @classmethod
    def starting(cls, run_id: str, place: RankPlace) -> "RankStatus":
        """Returns the status of this process at its start."""
        return cls(
            run_id=run_id,
            rank=place.rank,
            host=socket.gethostname(),
            process=ProcessIdentity(pid=os.getpid(), session=os.getsid(0)),
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
    """The first failed rank in `OUTPUT_DIR/ranks/failure_RUNID.json`. The first rank writes it, later ones cannot."""

    run_id: str
    rank: int
    host: str
    error: str | None
    """Error; None: it exited without an error message, and a neighbour writes this for it."""
    exit_code: int | None

    @classmethod
    def of(cls, status: RankStatus) -> "Failure":
        """Returns the failure of a rank that could still report it."""
        return cls(
            run_id=status.run_id,
            rank=status.rank,
            host=status.host,
            error=status.error,
            exit_code=status.exit_code,
        )

    @classmethod
    def seen(cls, run_id: str, rank: int, host: str, error: str | None) -> "Failure":
        """Returns the failure of a rank that cannot report it itself, as another process observes it."""
        return cls(run_id=run_id, rank=rank, host=host, error=error, exit_code=None)

    def describe(self) -> str:
        """Returns a clause for messages."""
        how = f"failed: {self.error}" if self.error is not None else "exited without an error message"
        return f"rank {self.rank} on {self.host} {how}"


class RankFolder:
    """`OUTPUT_DIR/ranks` of one run."""

    def __init__(self, output_dir: Path, run_id: str) -> None:
        self.output_dir = output_dir
        self.path = output_dir / "ranks"
        self.run_id = run_id

    def write_status(self, status: RankStatus) -> None:
        """Writes a status: a new file at the start of a rank, or where there is none, and into this file later.

        Nothing is written into the file of a later run. The file has room for the reason of an end, so that a full
        disk, which may be that reason, does not hide it; a longer one is cut there.

        Raises: OSError.
        """
        path = self.status_file(status.rank)
        if status.state == "running" and status.beats == 0:
            write_text(path, _file_text(status))
            return
        try:
            file = path.open("r+b", buffering=0)
        except FileNotFoundError:  # it was deleted under the run
            write_text_once(path, _file_text(status))
            return
        with file:  # what is read tells whose file it is, whatever has its name by now
            if _values(file.read()).get("run_id") != self.run_id:
                return
            try:
                os.pwrite(file.fileno(), _file_text(status).encode(), 0)
            except OSError:
                os.pwrite(file.fileno(), _file_text(replace(status, error=_shortened(status.error))).encode(), 0)

    def owner_of(self, rank: int) -> str | None:
        """Returns the id of the run that has written the status of a rank; None if there is no status."""
        owner = (read_json_object(self.status_file(rank)) or {}).get("run_id")
        return owner if isinstance(owner, str) else None

    def read_status(self, rank: int) -> RankStatus | None:
        """Returns a rank's status; None if it has not written any in this run."""
        values = self.read(self.status_file(rank))
        with suppress(KeyError, TypeError, ValueError):  # a file of another program
            step, activity = values["place"]
            process = ProcessIdentity(**values["process"])
            return RankStatus(**{**values, "process": process, "place": (step, activity)})
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
            return Failure(**self.read(self._failure_file))
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

        With them go what killed processes have left of files that they had not finished.

        Raises: RunError if a file cannot be removed, or the folder cannot be made.
        """
        with explained(self.path, action="made"):
            self.path.mkdir(parents=True, exist_ok=True)
        unfinished = chain.from_iterable(map(self.output_dir.glob, _UNFINISHED))
        for path in chain(unfinished, *map(self.path.glob, _OF_A_RUN)):
            if not self.read(path) and not path.name.endswith(self.run_id):
                with explained(path, action="removed"):
                    path.unlink(missing_ok=True)

    def status_file(self, rank: int) -> Path:
        """Returns the file of a rank, which every heartbeat changes (`hangs.py`)."""
        return self.path / f"rank_{rank}.json"

    def stack_file(self, rank: int) -> Path:
        """Returns the file into which a rank without progress writes its stacks."""
        return self.path / f"stack_{rank}.txt"

    @property
    def lost_file(self) -> Path:
        """The file by which a rank notes that it has lost a connection: the run ends with it."""
        return self.path / f"lost_connection_{self.run_id}"

    def read(self, path: Path) -> dict[str, Any]:
        """Returns the content of a file of the folder; empty if it is not of this run."""
        values = read_json_object(path)
        if values is None and path.exists():  # it may have been written just then
            values = read_json_object(path)
        return values if values is not None and values.get("run_id") == self.run_id else {}

    @property
    def _refusal_file(self) -> Path:
        return self.path / f"refused_{self.run_id}"

    @property
    def _failure_file(self) -> Path:
        return self.path / f"failure_{self.run_id}.json"


def _file_text(status: RankStatus) -> str:
    return json.dumps(asdict(status)).ljust(_STATUS_BYTES) + "\n"


def _values(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        return parse_json_object(content)
    return {}


def _shortened(error: str | None) -> str:
    """Returns the beginning of an error, which takes at most six bytes a character as JSON has it."""
    return (error or "")[: _STATUS_BYTES // 8]


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
    """Returns the id of the run that is active in a directory, on any machine.

    A killed run leaves its id behind, but then no process holds its lock, and on this machine its process is gone too.
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


_LOST_CONNECTION = re.compile(
    r"gloo.*(connection|socket|timed out|peer)"
    r"|connection (closed|reset|refused|was closed)|broken pipe|remote process exited|socket timeout"
    r"|nccl.*(remote|system) error",
    re.IGNORECASE | re.DOTALL,
)
"""What gloo, NCCL and torch's store write when the other side is gone: their errors are plain RuntimeErrors."""


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error shows that another rank is gone, so that it is not the cause of a failure.

    torch's own classes are compared by name, because a rank may fail before it has imported torch.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError) or "DistError" in names or bool(_LOST_CONNECTION.search(str(error)))
