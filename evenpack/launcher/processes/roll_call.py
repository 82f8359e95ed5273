"""Finds the rank that is gone when another one loses its connection.

A rank that is killed cannot say so. Those of its own machine see it, but those of other machines only lose a
connection, often before anything else is known, and with that they must not claim to be the first to fail. So a rank
that has lost a connection calls the roll, the guards of all ranks answer it, and the one that does not answer is named.

    ConnectionError on a rank -> call -> OUTPUT_DIR/ranks/roll_call_RUN -> guards: answer -> present_N_RUN
                             -> the rank whose answer is missing -> Failure

The files are empty, so that a full disk does not prevent an answer.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from evenpack.launcher.processes.ranks import Failure, RankFolder

ROLL_CALL_SECONDS = 10.0
"""Seconds for every guard to answer: it looks twice a second, and waits for a main thread that holds Python's lock."""

_POLL_SECONDS = 0.25
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


class RollCall:
    """The roll call of a run: at most one, because the run ends with it."""

    def __init__(self, folder: RankFolder) -> None:
        self._folder = folder
        self._call_file = folder.path / f"roll_call_{folder.run_id}"
        self._has_answered = False

    def answer(self, rank: int) -> None:
        """Answers for `rank` if the roll has been called. Raises: OSError."""
        if not self._has_answered and self._call_file.exists():
            self._answer_file(rank).touch()
            self._has_answered = True

    def call(self, rank: int, world_size: int, first_failure: Callable[[], Failure | None]) -> Failure | None:
        """Calls the roll as `rank`, and waits for every rank to answer.

        Returns: the failure that another process has recorded meanwhile, or that of the first rank that did not
        answer in time, which is recorded now; None if all have answered, so that only the network has failed.
        """
        with suppress(OSError):
            self._call_file.touch()
            self.answer(rank)  # at once: a launcher such as mpirun ends every rank a second after the first
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while (failure := first_failure()) is None and (missing := self._missing(world_size)):
            if time.monotonic() > deadline:
                with suppress(OSError):
                    return self._folder.claim_failure(self._silence(missing))
                return None
            time.sleep(_POLL_SECONDS)
        return failure

    def unanswered(self, world_size: int) -> Failure | None:
        """Returns the failure of a run whose launcher has ended all ranks during the roll call; None without a call.

        Those who had answered were alive when others had lost a connection; of the rest, one was the first to end.
        """
        missing = self._missing(world_size) if self._call_file.exists() else []
        if not missing:
            return None
        others = f", if it was not one of {', '.join(map(str, missing[1:]))}" if missing[1:] else ""
        error = f"others have lost their connection to it{others}; the launcher has ended all ranks since"
        return self._failure(missing, error)

    def _missing(self, world_size: int) -> list[int]:
        """Returns the ranks without an answer that have not ended by themselves."""
        self._folder.refresh()
        statuses = self._folder.read_statuses()
        return [
            rank
            for rank in range(world_size)
            if (rank not in statuses or statuses[rank].state == "running") and not self._answer_file(rank).exists()
        ]

    def _answer_file(self, rank: int) -> Path:
        return self._folder.path / f"present_{rank}_{self._folder.run_id}"

    def _silence(self, missing: Collection[int]) -> Failure:
        hosts = {rank: status.host for rank, status in self._folder.read_statuses().items()}
        started = [rank for rank in missing if rank in hosts]
        if not started:
            return self._failure(missing, "it has not started, or its machine does not see run.output_dir")
        silence = describe_silence(min(started), hosts, silent=missing)
        return self._failure(started, f"others have lost their connection to it; {silence}")

    def _failure(self, missing: Collection[int], error: str) -> Failure:
        rank = min(missing)
        status = self._folder.read_status(rank)
        return Failure(
            run_id=self._folder.run_id,
            rank=rank,
            host="an unknown machine" if status is None else status.host,
            error=error,
            exit_code=None,
            at=time.time(),
        )


def describe_silence(rank: int, hosts: Mapping[int, str], *, silent: Collection[int]) -> str:
    """Describes a rank that does not answer, by whether the others of its machine do; `hosts` by rank."""
    here = [other for other in sorted(hosts) if hosts[other] == hosts[rank]]
    if not set(here) <= set(silent):
        return "it does not answer, though its machine does: it was killed or stopped"
    if len(here) == 1:
        return "it does not answer: it was killed or stopped, or its machine is down or not reachable"
    return f"none of the ranks {here[0]} to {here[-1]} of its machine answers: the machine is down or not reachable"
