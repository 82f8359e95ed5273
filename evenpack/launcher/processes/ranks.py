"""How the ranks of a run report to each other: files in `OUTPUT_DIR/ranks`.

Through these files `evenpack train`, on one machine, learns how the processes ended that `deepspeed` started on any
machine that shares the folder. A run id in each file distinguishes it from files of an earlier run.
"""

import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from evenpack.engine.activity import ACTIVITIES, START, Activity
from evenpack.errors import RunError
from evenpack.files import explained, parse_json_object, read_json_object, write_text, write_text_once
from evenpack.launcher.processes.holding import is_held
from evenpack.launcher.processes.identities import ProcessIdentity, RankPlace

_STATUS_BYTES = 4095

_UNFINISHED = tuple(f".{name}.*.partial" for name in ("run.json", "summary.json", "metrics.jsonl", "metrics.csv"))
"""Temporary names of files that rank 0 alone writes."""

_OF_A_RUN = (".*.partial", "rank_*.json", "failure_*.json", "stack_*.txt")
_RANK_FILE = re.compile(r"rank_(\d+)\.json")


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

    def read(self, path: Path) -> dict[str, Any]:
        """Returns the content of a file of the folder; empty if it is not of this run."""
        values = read_json_object(path)
        if values is None and path.exists():  # it may have been written just then
            values = read_json_object(path)
        return values if values is not None and values.get("run_id") == self.run_id else {}

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
