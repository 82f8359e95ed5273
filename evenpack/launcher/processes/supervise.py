"""Runs a launch plan to its end: passes on stop requests, notices ranks that die, leaves no process behind.

The launcher and its children on this machine are in a session of their own. A terminal's Ctrl-C therefore reaches only
this process, and all remaining processes of the session can be found and killed.

How the run has ended follows from the statuses in `OUTPUT_DIR/ranks`. The exit code of `deepspeed` alone is not enough:
it is 0 if its own child was killed, and if several ranks fail it is the code of the one that it checked first.
"""

import os
import signal
import subprocess
import time
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from evenpack.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from evenpack.launch_environment import without_launcher
from evenpack.launcher.processes.hangs import HangLimits, HangMonitor
from evenpack.launcher.processes.holding import held_output_dir
from evenpack.launcher.processes.identities import LaunchToken
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, is_lost_connection
from evenpack.launcher.processes.start import LaunchPlan
from evenpack.launcher.processes.stop import (
    SAME_REQUEST_SECONDS,
    StopRequest,
    handled_stop_signals,
    remove_stop_request,
    take_end_of_starter,
    write_stop_request,
)
from evenpack.worker_pool import is_resource_tracker


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """The outcome of a run."""

    state: Literal["finished", "stopped", "failed"]
    """`stopped`: it was asked to stop, has saved, and continues when it is started again."""
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
    if failure is None:  # none was recorded, as on a full disk
        failures = [Failure.of(status) for status in statuses.values() if not _ended_well(status)]
        failure = min(failures, key=_follows_from_others, default=None)
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
    """Describes an exit code: a launcher reports a rank's signal N as 256 - N; its own end by one is -N.

    255 and 254 stay numbers: `ssh` and `sys.exit(-1)` end with 255, and ranks catch SIGHUP and SIGINT.
    """
    number = -launcher_code if launcher_code < 0 else 256 - launcher_code
    names = {known.value: known.name for known in signal.Signals}  # most real-time signals have no name
    if number not in names or launcher_code in (254, 255):
        return f"exit code {launcher_code}"
    return f"killed by {names[number]}{_HINTS.get(number, '')}"


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the kernel does that when memory runs out",
    signal.SIGBUS: "; the kernel does that when a file that is mapped was cut short, or its disk fails",
}


def _failed(failure: Failure, launcher_code: int, *, everyone: bool) -> LaunchResult:
    if failure.exit_code == EXIT_BAD_INPUT:  # the rank has printed why
        message = "" if everyone else f"rank {failure.rank} on {failure.host} ended with this error: {failure.error}"
        return LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message=message, error=failure.error)
    if failure.error is None and launcher_code == EXIT_BAD_INPUT:
        message = f"rank {failure.rank} on {failure.host} ended with an error that it could not record; see above"
        return LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message=message, error=None)
    how = f" ({describe_exit(launcher_code)})" if failure.error is None else ""
    return _error(failure.describe() + how)


def _follows_from_others(failure: Failure) -> tuple[bool, bool]:
    """Returns what sorts failures that another one has caused behind it."""
    is_lost = failure.error is not None and is_lost_connection(RuntimeError(failure.error))
    return is_lost, failure.exit_code != EXIT_BAD_INPUT


def _ended_well(status: RankStatus) -> bool:
    return status.state in ("finished", "stopped")


def _error(message: str) -> LaunchResult:
    return LaunchResult(state="failed", exit_code=1, message=message, error=None)


_POLL_SECONDS = 0.25
_KILL_SECONDS = 30.0
"""Seconds for the kernel to end killed processes; one that waits for a broken disk takes longer."""
_TRACKER_SECONDS = 5.0
"""Seconds for resource trackers to end after the processes whose resources they track."""
_FAILURE_SECONDS = 25.0
"""Seconds from the first failure to the end of every process."""
_LEAVING_SECONDS = 60.0
"""Seconds from rank 0's successful end to the end of every process."""
_STRAY_SECONDS = 10.0
"""Seconds from the end of the launcher and the ranks to the end of processes that they have started."""
_REMOTE_SECONDS = 5.0
"""Seconds for other machines to stop immediately, and for a shared folder to show their final statuses."""


def supervise(
    plan: LaunchPlan,
    output_dir: Path,
    *,
    say: Callable[[str], None],
    output: IO[str] | None = None,
    limits: HangLimits | None = None,
) -> LaunchResult:
    """Starts the plan's command and returns when none of its processes is left on this machine.

    A first SIGINT, SIGTERM or SIGHUP asks the ranks to save at the end of the step, a second one kills them.
    `output` receives the output of the ranks; None: this process's own standard output. A run without progress for
    longer than `limits` is ended; None: it may hang for ever.

    Raises: RunError if another run has locked `output_dir`, or it cannot be written.
    """
    token = LaunchToken.of_this_process()
    folder = RankFolder(output_dir, token.run_id)
    with held_output_dir(output_dir):
        folder.remove_earlier()
        remove_stop_request(output_dir)
        try:
            return _Supervisor(plan, token, folder, say=say, limits=limits).run(output)
        finally:
            remove_stop_request(output_dir)


def session_processes(session: int) -> list[psutil.Process]:
    """Returns the living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_stopped(session: int) -> None:
    """Kills processes of a session that are stopped, as all of a frozen run: they would not end before a deadline."""
    for process in session_processes(session):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_STOPPED:
                continue
            if is_resource_tracker(process.cmdline()):
                process.resume()  # it ends by itself
            else:
                process.kill()


def kill_session(session: int) -> None:
    """Kills every process of a session, including those that are started meanwhile.

    Resource trackers have a while to remove what the others have left, and to end by themselves.
    """
    begun = time.monotonic()
    while time.monotonic() < begun + _KILL_SECONDS and (processes := session_processes(session)):
        trackers_too = time.monotonic() > begun + _TRACKER_SECONDS
        for process in processes:
            with suppress(psutil.Error):
                if trackers_too or not is_resource_tracker(process.cmdline()):
                    process.kill()
        psutil.wait_procs(processes, timeout=1.0)


class _Supervisor:
    def __init__(
        self,
        plan: LaunchPlan,
        token: LaunchToken,
        folder: RankFolder,
        *,
        say: Callable[[str], None],
        limits: HangLimits | None,
    ) -> None:
        self._plan = plan
        self._token = token
        self._folder = folder
        self._say = say
        self._hangs = None if limits is None else HangMonitor(folder, plan.devices.ranks, limits=limits)
        self._signals: list[tuple[float, int]] = []
        self._asked_to_stop = False
        self._killed_by: int | None = None
        self._deadline: float | None = None

    def run(self, output: IO[str] | None) -> LaunchResult:
        with handled_stop_signals(self._on_signal):
            child = subprocess.Popen(
                self._plan.command_of(self._token),
                env={**without_launcher(os.environ), **self._plan.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                start_new_session=True,
            )
            try:
                self._watch(child.pid)
            finally:
                kill_session(child.pid)
                child.wait()
        if self._killed_by is not None:
            return killed(self._killed_by)
        statuses = self._wait_for_final_statuses()
        if not self._folder.path.is_dir():
            message = (
                f"{self._folder.output_dir} was removed while the run was writing into it; start the same command again"
            )
            return LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message=message, error=None)
        return launch_result(
            statuses,
            self._folder.read_failure(),
            ranks=self._plan.devices.ranks,
            launcher_code=child.returncode,
            folder=self._folder.path,
        )

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        is_repeat = bool(self._signals)
        if take_end_of_starter() and is_repeat:
            return  # a study that was asked to stop, and passed it on, is gone before its runs have saved
        self._signals.append((time.monotonic(), number))

    def _watch(self, child: int) -> None:
        """Returns when every process of the session has ended, or has to be killed."""
        while not _has_ended(child) or session_processes(child):
            self._answer_signals(child)
            with suppress(OSError):
                if self._hangs is not None:
                    self._hangs.check()
            self._set_deadline(child)
            is_over = self._deadline is not None and time.monotonic() > self._deadline
            if is_over or self._killed_by is not None:
                return
            time.sleep(_POLL_SECONDS)

    def _answer_signals(self, child: int) -> None:
        if self._signals and not self._asked_to_stop:
            self._asked_to_stop = True
            self._request_stop(at_once=False)
            self._say("saving at the end of this step; press again to stop immediately")
        again = [number for at, number in self._signals if at - self._signals[0][0] > SAME_REQUEST_SECONDS]
        if again:
            self._killed_by = again[0]
            self._request_stop(at_once=True)
            self._say("stopping immediately")
            if self._plan.devices.kind == "hosts":
                os.kill(child, signal.SIGTERM)  # upon which `deepspeed` kills processes that pdsh has started elsewhere
                self._wait_for_final_statuses()

    def _request_stop(self, *, at_once: bool) -> None:
        output_dir = self._folder.output_dir
        try:
            write_stop_request(output_dir, StopRequest(run_id=self._folder.run_id, at_once=at_once))
        except OSError as error:
            self._say(f"{output_dir} cannot be written ({error.strerror}): asking this machine's ranks directly")
            for status in self._living_ranks():
                os.kill(status.process.pid, signal.SIGTERM)

    def _set_deadline(self, child: int) -> None:
        """Sets a deadline for all processes to end by themselves once the run's end is certain."""
        if self._deadline is not None:
            return
        first = self._folder.read_status(0)
        if self._folder.read_failure() is not None:
            self._deadline = time.monotonic() + _FAILURE_SECONDS
            kill_stopped(child)
        elif first is not None and first.state in ("finished", "stopped"):
            self._deadline = time.monotonic() + _LEAVING_SECONDS
        elif _has_ended(child) and not self._living_ranks():
            self._deadline = time.monotonic() + _STRAY_SECONDS

    def _living_ranks(self) -> list[RankStatus]:
        """Returns the ranks of this machine without a final status."""
        return [
            status
            for status in self._folder.read_statuses().values()
            if status.host == self._token.host and status.state == "running" and status.process.is_alive()
        ]

    def _wait_for_final_statuses(self) -> dict[int, RankStatus]:
        deadline = time.monotonic() + _REMOTE_SECONDS
        while True:
            statuses = self._folder.read_statuses()
            done = len(statuses) == self._plan.devices.ranks and all(s.state != "running" for s in statuses.values())
            if done or time.monotonic() > deadline or self._plan.devices.kind != "hosts":
                return statuses
            time.sleep(_POLL_SECONDS)


def _has_ended(child: int) -> bool:
    """Returns whether a child has ended; it is not reaped, so that its pid, the session's id, is not reused."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
