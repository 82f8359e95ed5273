"""Determines the outcome of a run from the statuses in `OUTPUT_DIR/ranks`.

The exit code of `deepspeed` alone is not enough: it is 0 if its own child was killed, and if several ranks fail it is
that of the one it checked first.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evenpack.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from evenpack.launcher.processes.ranks import Failure, RankStatus


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """The outcome of a run."""

    state: Literal["finished", "stopped", "failed"]
    exit_code: int
    message: str
    """Message for the user; empty if the ranks have printed everything."""
    error: str | None
    """The error that the first failed rank has printed, if the user can correct it; None for any other end."""


def launch_result(
    statuses: Mapping[int, RankStatus], failure: Failure | None, *, ranks: int, launcher_code: int, folder: Path
) -> LaunchResult:
    """Returns the outcome of a run of `ranks` ranks whose processes have all ended.

    `launcher_code` is the exit code of the launcher; it is only used for a rank that could not report how it ended.
    """
    failure = failure or next((Failure.of(status) for status in statuses.values() if not _ended_well(status)), None)
    if failure is not None:
        everyone = all(status.error == failure.error for status in statuses.values())
        return _failed(failure, launcher_code, everyone=everyone)
    if not statuses:
        end = describe_exit(launcher_code)
        return _error(f"the launcher of the ranks ended ({end}) before any rank had started; its output is above")
    missing = [rank for rank in range(ranks) if rank not in statuses]
    is_early = any(status.state == "stopped" and status.step is None for status in statuses.values())
    if is_early and (not missing or launcher_code == EXIT_STOPPED):  # no rank has failed before it had a status
        message = "stopped before the first step; run the same command again to continue"
        return LaunchResult(state="stopped", exit_code=EXIT_STOPPED, message=message, error=None)
    if missing:
        names = ", ".join(map(str, missing))
        return _error(f"no status of rank {names} in {folder}: all machines must see the same run.output_dir")
    if any(status.state == "stopped" for status in statuses.values()):
        message = f"stopped and saved after step {statuses[0].step}; run the same command again to continue"
        return LaunchResult(state="stopped", exit_code=EXIT_STOPPED, message=message, error=None)
    return LaunchResult(state="finished", exit_code=0, message="", error=None)


def killed(by: int) -> LaunchResult:
    """Returns the outcome of a run that was stopped immediately; exit code as a shell reports the signal."""
    message = "stopped immediately; the same command continues from the last checkpoint"
    return LaunchResult(state="failed", exit_code=128 + by, message=message, error=None)


def describe_exit(launcher_code: int) -> str:
    """Describes an exit code: a launcher reports a rank's signal N as 256 - N; its own end by one is -N."""
    number = -launcher_code if launcher_code < 0 else 256 - launcher_code
    if number not in signal.valid_signals():
        return f"exit code {launcher_code}"
    hint = "; the kernel does that when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"


def _failed(failure: Failure, launcher_code: int, *, everyone: bool) -> LaunchResult:
    if failure.exit_code == EXIT_BAD_INPUT:  # the rank has printed why
        message = "" if everyone else f"rank {failure.rank} on {failure.host} ended with the error above"
        return LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message=message, error=failure.error)
    if failure.error is None and launcher_code == EXIT_BAD_INPUT:
        message = f"rank {failure.rank} on {failure.host} ended with an error that it could not record; see above"
        return LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message=message, error=None)
    how = f" ({describe_exit(launcher_code)})" if failure.error is None else ""
    return _error(failure.describe() + how)


def _ended_well(status: RankStatus) -> bool:
    return status.state in ("finished", "stopped")


def _error(message: str) -> LaunchResult:
    return LaunchResult(state="failed", exit_code=1, message=message, error=None)
