"""One start of a run: its processes, how far it is, and how it ends."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from evenpack.launcher.processes.start import LOCAL_LAUNCHER
from faults.subject import SUBJECT_VARIABLE, SubjectRun, listed, temporary_dir
from faults.traces import Traces, described, left_behind, mapped_names

END_SECONDS = 60.0
"""Time from a fault to the end of every process that the house promises."""

_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class End:
    """How a life ended."""

    exit_code: int
    seconds: float
    """From the fault to the end of the last process."""
    said: str
    """What was printed after the fault."""
    orphans: tuple[str, ...]
    """Processes that did not end within `END_SECONDS`."""


class Life:
    """A command that trains a run, from its start to the end of its processes."""

    def __init__(self, run: SubjectRun, command: list[str], log: Path) -> None:
        """Starts the command, in a session of its own."""
        self.run = run
        self._log = log
        self._mark = 0
        self._marked_at = time.monotonic()
        self._names: set[str] = set()
        self._before = self._traces()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=run.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_hear_signals,  # noqa: PLW1509 - a campaign has no threads
            )

    def mark(self) -> None:
        """Begins to measure the time, and to collect what is said; notes what the run has in shared memory."""
        self._names |= mapped_names(self.living())
        self._mark = self._log.stat().st_size
        self._marked_at = time.monotonic()

    def said(self) -> str:
        """Returns what was printed since `mark`."""
        with self._log.open("rb") as file:
            file.seek(self._mark)
            return file.read().decode(errors="replace")

    def step(self) -> int:
        """Returns the last step in metrics.jsonl; 0 without one."""
        with suppress(OSError, ValueError, KeyError), (self.run.output_dir / "metrics.jsonl").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            whole = [line for line in file.read().split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
            return int(json.loads(whole[-1])["step"]) if whole else 0
        return 0

    def is_on(self) -> bool:
        """Returns whether the started command has not ended."""
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes that are ranks of this life, in order."""
        found = []
        for path in listed(self.run.output_dir / "ranks", "rank_*.json"):
            with suppress(OSError, ValueError, KeyError, psutil.Error):
                process = psutil.Process(json.loads(path.read_text())["process"]["pid"])
                if process.environ().get(SUBJECT_VARIABLE) == str(self.run.folder) and _lives(process):
                    found.append(process)
        return found

    def launchers(self) -> list[psutil.Process]:
        """Returns the command that was started, and what it has started between it and the ranks."""
        ranks = {process.pid for process in self.ranks()}
        with suppress(psutil.Error):
            whole = psutil.Process(self.process.pid)
            between = [
                process
                for process in whole.children(recursive=True)
                if process.pid not in ranks
                and any(name in " ".join(process.cmdline()[:5]) for name in ("deepspeed", LOCAL_LAUNCHER))
            ]
            return [whole, *between] if whole.pid not in ranks else []
        return []

    def living(self) -> list[psutil.Process]:
        """Returns every process of the run that lives."""
        return living_in(self.run.folder)

    def wait_for(self, condition: Callable[[], bool], *, seconds: float) -> bool:
        """Returns True once the condition holds, False if the command ends before, or the time is over."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.is_on() or time.monotonic() > deadline:
                return condition()
            time.sleep(_POLL_SECONDS)
        return True

    def wait_for_end(self, *, seconds: float = END_SECONDS) -> End | None:
        """Waits for the end of all processes; None if they live on for so long after the mark: they stay."""
        while time.monotonic() - self._marked_at < seconds:
            if not self.is_on() and not self.living():
                return self._end(())
            time.sleep(0.2)
        if self.is_on():
            return None
        return self._end(tuple(map(described, self.living())))

    def left_behind(self) -> list[str]:
        """Returns what there is besides the run's files that was not there before its start."""
        return left_behind(self._before, self._traces)

    def kill(self) -> None:
        """Ends everything that is left."""
        for process in self.living():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        while self.living():
            time.sleep(0.1)

    def _traces(self) -> Traces:
        return Traces.now(temporary_dir(self.run.folder), self.living(), self._names)

    def _end(self, orphans: tuple[str, ...]) -> End:
        seconds = time.monotonic() - self._marked_at
        return End(exit_code=self.process.wait(), seconds=seconds, said=self.said(), orphans=orphans)


def living_in(folder: Path) -> list[psutil.Process]:
    """Returns the living processes that were started with the environment of a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(SUBJECT_VARIABLE) == str(folder) and _lives(process):
                found.append(process)
    return found


def _hear_signals() -> None:
    """Undoes what `nohup` and a shell's `&` do: a run leaves signals ignored that it finds so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _lives(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)
