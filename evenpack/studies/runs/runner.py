"""Runs the jobs of a study, as many at a time as there are groups of devices, and resumes an earlier call.

A finished job is not started again; one that failed, or was stopped, is, and resumes: a training from its newest
checkpoint. A job that fails stops no others, except those that would begin with its weights.

result.json   in the folder of a job that has ended: its state, and the run file with the overrides applied
study.log     the output of its commands
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from evenpack.config import with_defaults
from evenpack.data.checksums import with_checksum, without_checksum
from evenpack.data.manifest import MANIFEST
from evenpack.differences import differences
from evenpack.errors import EXIT_STOPPED, ConfigError
from evenpack.files import read_kept, write_json
from evenpack.progress import Piece, Progress
from evenpack.studies.runs.jobs import Job

log = logging.getLogger(__name__)

RESULT = "result.json"
LOG = "study.log"

PLACES = (
    "run.name",
    "run.output_dir",
    "data.prepared_dir",
    "data.tokens_dir",
    "data.folder",
    "training.initialize_from",
)
"""Keys of paths, which do not change the trained result."""
_POLL_SECONDS = 0.25
_MESSAGE_BYTES = 1 << 16
_MESSAGE_CHARACTERS = 600

State = Literal["finished", "failed", "unfinished"]


@runtime_checkable
class Process(Protocol):
    """A command that was started."""

    def poll(self) -> int | None:
        """Returns the exit code; None while the process runs."""


@runtime_checkable
class RunDevices(Protocol):
    """Devices that one run at a time gets."""

    @property
    def ranks(self) -> int: ...

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> Process:
        """Starts `evenpack COMMAND RUN.yaml OVERRIDES OPTIONS` on these devices; its output goes to `log`."""


@runtime_checkable
class Machine(Protocol):
    """The part of this machine that a study needs."""

    @property
    def is_stop_requested(self) -> bool:
        """Whether the user has requested a stop, which running jobs have received too."""

    def device_groups(self, devices_per_run: int | None) -> Sequence[RunDevices]:
        """Returns all devices, in groups of so many; None: one group of all. Raises: ConfigError if there are fewer."""

    def held(self, output_dir: Path) -> AbstractContextManager[None]:
        """Locks the folder for one study, and handles stop requests.

        Raises: RunError if another study has locked it, or it cannot be written.
        """


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The outcome of a run."""

    state: Literal["finished", "failed"]
    message: str
    """Error of a run that failed."""
    config: dict[str, Any]
    """The run file with the overrides applied."""

    def write(self, output_dir: Path) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps(asdict(self)))  # as it will be read
        write_json(output_dir / RESULT, with_checksum(content))


def read_result(run: Job) -> RunResult | None:
    """Reads a result; None if the run has not ended, or the file is damaged: its command then finds what it has done.

    Raises: ConfigError if the run has finished with other settings than the study has now.
    """
    path = run.output_dir / RESULT
    if not path.exists():
        return None
    try:
        result = RunResult(**without_checksum(read_kept(path) or {}))
    except (TypeError, ValueError):
        log.warning("%s is damaged or of another version: %s counts as not ended", path, run.key)
        return None
    changed = differences(with_defaults(result.config, type(run.config)), run.config.model_dump(mode="json"))
    changed = {key: pair for key, pair in changed.items() if key not in PLACES}
    if result.state == "finished" and changed:
        key, (before, now) = next(iter(changed.items()))
        raise ConfigError(
            f"run {run.key} was trained with {key} {before}, and the study now has {now}: undo that change, choose "
            f"another study.output_dir, or remove {run.output_dir} to train it again"
        )
    return result


def describe_state(run: Job) -> str:
    """Describes the state in a few words. Raises: as `read_result`."""
    result = read_result(run)
    if result is not None:
        return result.state
    done = run.done()
    return f"{run.unit} {done}" if done else "to do"


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """The outcome of a run in this call, or an earlier one."""

    run: Job
    state: State
    message: str


@dataclass(kw_only=True)
class _Started:
    run: Job
    process: Process
    devices: RunDevices
    log: Path
    log_start: int
    """Size of the log before the start."""


@dataclass(kw_only=True)
class _Study:
    runs: Sequence[Job]
    machine: Machine
    say: Callable[[str], None]
    ended: dict[str, EndedRun] = field(default_factory=dict)
    active: list[_Started] = field(default_factory=list)
    free: list[RunDevices] = field(default_factory=list)

    def resume_earlier_runs(self) -> None:
        for run in self.runs:
            result = read_result(run)
            if result is not None and result.state == "finished":
                self._end(run, "finished", "")

    def prepare_data(self, devices: RunDevices) -> None:
        """Prepares missing data, once for all runs that share it."""
        to_do = {run.prepared_dir: run for run in reversed(self.runs) if run.key not in self.ended}
        for directory, run in reversed(to_do.items()):
            if directory is None or (directory / MANIFEST).is_file() or self.machine.is_stop_requested:
                continue
            self.say(f"preparing {directory}")
            started = self._start("prepare", run, devices)
            while (code := started.process.poll()) is None:
                time.sleep(_POLL_SECONDS)
            if code == 0 or self.machine.is_stop_requested:
                continue
            message = f"its data could not be prepared: {_last_message(started, code)}"
            for other in self.runs:
                if other.prepared_dir == directory and other.key not in self.ended:
                    self._fail(other, message)

    def advance(self) -> bool:
        """Records ended runs and starts others; returns whether any is still running."""
        for started in list(self.active):
            code = started.process.poll()
            if code is not None:
                self.active.remove(started)
                self.free.append(started.devices)
                self._conclude(started, code)
        while self.free and not self.machine.is_stop_requested and (run := self._next()) is not None:
            self.say(f"starting {run.key}")
            self.active.append(self._start(run.command, run, self.free.pop()))
        return bool(self.active)

    def outcome(self, run: Job) -> EndedRun:
        return self.ended.get(run.key) or EndedRun(run=run, state="unfinished", message="")

    def _next(self) -> Job | None:
        """Returns the first run that can be started now; fails runs that can never start."""
        begun = {started.run.key for started in self.active} | self.ended.keys()
        for run in self.runs:
            if run.key in begun:
                continue
            if run.starts_from is None:
                return run
            start = self.ended.get(run.starts_from)
            if start is not None and start.state == "finished":
                return run
            if start is not None and start.state == "failed":
                self._fail(run, f"run {run.starts_from}, with whose weights it begins, has failed")
        return None

    def _start(self, command: str, run: Job, devices: RunDevices) -> _Started:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        log = run.output_dir / LOG
        size = log.stat().st_size if log.exists() else 0
        options = run.options if command == run.command else ()
        process = devices.start(command, run.run_file, run.overrides, log=log, options=options)
        return _Started(run=run, process=process, devices=devices, log=log, log_start=size)

    def _conclude(self, started: _Started, code: int) -> None:
        run = started.run
        if code == 0:
            self._write(run, "finished", "")
            self._end(run, "finished", "")
        elif code == EXIT_STOPPED or self.machine.is_stop_requested:
            self._end(run, "unfinished", f"stopped at {run.unit} {run.done()}")
        else:
            self._fail(run, _last_message(started, code))

    def _fail(self, run: Job, message: str) -> None:
        self.say(f"{run.key} failed: {message}")
        self._write(run, "failed", message)
        self._end(run, "failed", message)

    def _end(self, run: Job, state: State, message: str) -> None:
        self.ended[run.key] = EndedRun(run=run, state=state, message=message)

    @staticmethod
    def _write(run: Job, state: Literal["finished", "failed"], message: str) -> None:
        RunResult(state=state, message=message, config=run.config.model_dump(mode="json")).write(run.output_dir)


def train_runs(
    runs: Sequence[Job],
    machine: Machine,
    groups: Sequence[RunDevices],
    progress: Progress,
    *,
    earlier: Sequence[EndedRun] = (),
) -> tuple[EndedRun, ...]:
    """Runs unfinished jobs, one at a time on each group of devices; returns all outcomes, in the order of `runs`.

    It returns early, with unfinished jobs, if the machine is asked to stop, or if jobs that they need do not finish.

    Args:
        runs: at least one, all counted in the same unit.
        earlier: outcomes of other jobs with whose weights these may begin.

    Raises: ConfigError if a job has been finished with other settings.
    """
    study = _Study(runs=runs, machine=machine, say=progress.note, free=list(reversed(groups)))
    study.ended |= {one.run.key: one for one in earlier}
    study.resume_earlier_runs()
    study.prepare_data(groups[0])
    planned = {run.key: run.planned() for run in runs}
    piece = progress.begin("study", done=_amount(study, planned), unit=f"{runs[0].unit}s")
    while study.advance():
        _show(study, piece, planned)
        time.sleep(_POLL_SECONDS)
    return tuple(study.outcome(run) for run in runs)


def recorded(runs: Sequence[Job]) -> tuple[EndedRun, ...]:
    """Returns the outcomes that the folders of the runs record, without starting anything. Raises: as `train_runs`."""
    found = []
    for run in runs:
        result = read_result(run)
        state: State = "unfinished" if result is None else result.state
        found.append(EndedRun(run=run, state=state, message="" if result is None else result.message))
    return tuple(found)


def _amount(study: _Study, planned: Mapping[str, int]) -> int:
    """Returns the work done so far; an ended job counts fully, so that the remaining time is of unfinished work."""
    return sum(planned[run.key] if run.key in study.ended else min(planned[run.key], run.done()) for run in study.runs)


def _show(study: _Study, piece: Piece, planned: Mapping[str, int]) -> None:
    ended = [study.ended[run.key] for run in study.runs if run.key in study.ended]
    failed = sum(one.state == "failed" for one in ended)
    at_work = ", ".join(started.run.key for started in study.active)
    facts = [f"{len(ended)}/{len(study.runs)} runs done", *([f"{failed} failed"] if failed else []), at_work]
    piece.update(_amount(study, planned), sum(planned.values()), facts=facts)


def _last_message(started: _Started, code: int) -> str:
    """Returns the last error that the command has printed, or its last line."""
    try:
        with started.log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(started.log_start, end - _MESSAGE_BYTES))
            text = file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"exit code {code}, and {started.log} cannot be read: {error.strerror}"
    _, mark, message = text.rpartition("error: ")
    words = message if mark else text.rpartition("\n")[2]
    return f"{words[:_MESSAGE_CHARACTERS].strip() or f'exit code {code}'} (all of it in {started.log})"
