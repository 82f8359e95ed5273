"""Runs steps one after the other, each a command with a time limit, and remembers in a file how each ended.

It needs nothing but Python: the first step may be the one that installs everything else.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["done", "failed", "timed out", "left out"]
"""left out: a step that it needs is not done, or the day's time is used up."""

_GRACE_SECONDS = 10.0
"""Time between the request to end and the signal that cannot be ignored."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the day."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    needs: tuple[str, ...] = ()
    """Steps that must be done before."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """How a step ended."""

    status: Status
    seconds: float
    exit_code: int | None
    """None: it was not started, or was ended."""
    reason: str


class Day:
    """The steps' results in `DIRECTORY/state.json`, and their output in `DIRECTORY/logs`."""

    def __init__(self, directory: Path) -> None:
        """Reads what an earlier start has done. Raises: ValueError for a file that is no state."""
        self.directory = directory
        self._state = directory / "state.json"
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        self.results: dict[str, StepResult] = {}
        if self._state.exists():
            values: dict[str, dict[str, Any]] = json.loads(self._state.read_text(encoding="utf-8"))
            self.results = {name: StepResult(**value) for name, value in values.items()}

    def run(self, steps: Sequence[Step], *, limit_seconds: float, environment: Mapping[str, str]) -> bool:
        """Runs every step that is not done; what failed before is tried again. Returns whether all are done.

        Args:
            limit_seconds: no step is started that could end after it.
        """
        names = [step.name for step in steps]
        if len(set(names)) < len(names):
            raise ValueError(f"two steps have one name: {', '.join(sorted(names))}")
        end = time.monotonic() + limit_seconds
        for step in steps:
            if self._is_done(step.name):
                continue
            missing = [need for need in step.needs if not self._is_done(need)]
            if missing:
                result = _left_out(f"needs {', '.join(missing)}")
            elif time.monotonic() + step.limit_seconds > end:
                result = _left_out("the day's time is used up; start again to go on")
            else:
                print(f"{step.name} ...", flush=True)
                result = self._run(step, environment)
            print(f"{step.name}: {result.status}, {result.seconds:.0f} s {result.reason}", flush=True)
            self.results[step.name] = result
            self._write_state()
        return all(self._is_done(name) for name in names)

    def _write_state(self) -> None:
        partial = self._state.with_suffix(".partial")
        values = {name: asdict(one) for name, one in self.results.items()}
        partial.write_text(json.dumps(values, indent=1), encoding="utf-8")
        partial.replace(self._state)

    def log_of(self, name: str) -> Path:
        """Returns the file that holds a step's output."""
        return self.directory / "logs" / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.txt"

    def _is_done(self, name: str) -> bool:
        return name in self.results and self.results[name].status == "done"

    def _run(self, step: Step, environment: Mapping[str, str]) -> StepResult:
        started = time.monotonic()
        with self.log_of(step.name).open("w", encoding="utf-8") as log:
            print(" ".join(step.command), file=log, flush=True)
            try:
                process = subprocess.Popen(
                    step.command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            except OSError as error:
                return StepResult(status="failed", seconds=0.0, exit_code=None, reason=str(error))
            try:
                code = process.wait(timeout=step.limit_seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                reason = f"over its limit of {step.limit_seconds:.0f} s"
                return StepResult(status="timed out", seconds=time.monotonic() - started, exit_code=None, reason=reason)
            except BaseException:
                _end(process)
                raise
        return StepResult(
            status="failed" if code else "done",
            seconds=time.monotonic() - started,
            exit_code=code,
            reason=f"see {self.log_of(step.name)}" if code else "",
        )


def table(steps: Sequence[Step], results: Mapping[str, StepResult]) -> str:
    """Returns the steps and how they ended, as Markdown."""
    lines = ["| step | ended | s | |", "| --- | --- | --- | --- |"]
    for step in steps:
        result = results.get(step.name, _left_out("not reached"))
        lines.append(f"| {step.name} | {result.status} | {result.seconds:.0f} | {result.reason} |")
    return "\n".join(lines)


def _left_out(reason: str) -> StepResult:
    return StepResult(status="left out", seconds=0.0, exit_code=None, reason=reason)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it started."""
    for request, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, request)
            process.wait(timeout=seconds)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
