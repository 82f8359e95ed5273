"""Runs the steps of a part, each a command with a time limit, and writes every value as soon as a step has it.

    steps  ->  run_part  ->  PREFIX.json (values), PREFIX.md (a page of them), PREFIX.txt (all output)

It needs nothing but Python.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from gpu_day import ROOT
from gpu_day.report import page

Status = Literal["done", "failed", "timed out", "left out"]
"""left out: the part's time is used up."""

GRACE_SECONDS = 5.0
"""Time between the request to end and the signal that cannot be ignored."""

LEAST_SECONDS = 15.0
"""A step that would have less than this is left out: it would not get beyond its imports."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """How a step ended."""

    status: Status
    seconds: float
    exit_code: int | None
    """None: it was not started, or was ended."""
    last_line: str
    """The last line of its output, or the reason why there is none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is written of an hour's steps."""

    prefix: Path
    """Of the names of its three files."""
    values: Path
    """The folder in which steps leave their values, as NAME.json."""
    facts: Mapping[str, Any]
    """What the values come from: command, commit, device, versions."""
    results: dict[str, StepResult] = field(default_factory=dict)

    @classmethod
    def begun(cls, *, prefix: Path, values: Path, facts: Mapping[str, Any]) -> "Part":
        """Returns a part whose folders are there, that of the values empty."""
        shutil.rmtree(values, ignore_errors=True)
        for folder in (values, prefix.parent):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(prefix=prefix, values=values, facts=facts)

    def file(self, ending: str) -> Path:
        """Returns the path of one of its files."""
        return self.prefix.with_name(f"{self.prefix.name}.{ending}")

    def publish(self) -> None:
        """Writes all values that there are."""
        steps = {name: asdict(result) for name, result in self.results.items()}
        results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(self.values.glob("*.json"))}
        value = {**self.facts, "steps": steps, "results": results}
        _replace(self.file("json"), json.dumps(value, indent=1) + "\n")
        _replace(self.file("md"), page(self.prefix.name, value))


def run_part(part: Part, steps: Sequence[Step], *, limit_seconds: float, environment: Mapping[str, str]) -> bool:
    """Runs the steps in turn, whatever becomes of the others. Returns whether all are done.

    Args:
        limit_seconds: of the whole part. A step has its own limit or what is left of this one.
    """
    end = time.monotonic() + limit_seconds - GRACE_SECONDS
    part.file("txt").unlink(missing_ok=True)
    for step in steps:
        left = end - time.monotonic()
        if left < min(LEAST_SECONDS, step.limit_seconds):
            result = StepResult(status="left out", seconds=0.0, exit_code=None, last_line="the part's time is used up")
        else:
            print(f"{step.name} ...", flush=True)
            limit = min(step.limit_seconds, left)
            result = run_step(step, limit, part.file("txt"), {**os.environ, **environment}, part.publish)
        print(f"{step.name}: {result.status}, {result.seconds:.0f} s: {result.last_line}", flush=True)
        part.results[step.name] = result
        part.publish()
    return all(part.results[step.name].status == "done" for step in steps)


def run_step(
    step: Step,
    limit_seconds: float,
    log_file: Path,
    environment: Mapping[str, str],
    publish: Callable[[], object] = lambda: None,
) -> StepResult:
    """Runs a command to its end or its limit, in this environment alone, and adds what it says to the log."""
    started = time.monotonic()
    status: Status
    with log_file.open("a+", encoding="utf-8", errors="replace") as log:
        print(f"\n=== {step.name}: {' '.join(step.command)}", file=log, flush=True)
        begin = log.tell()
        try:
            process = subprocess.Popen(
                step.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            return StepResult(status="failed", seconds=0.0, exit_code=None, last_line=str(error))
        try:
            code = _wait(process, started + limit_seconds, publish)
            status = "done" if code == 0 else "failed"
            said = _last_line(log, begin)
        except subprocess.TimeoutExpired:
            code, status = None, "timed out"
            said = f"over its limit of {limit_seconds:.0f} s, after: {_last_line(log, begin)}"
        finally:
            _end(process)
    return StepResult(status=status, seconds=round(time.monotonic() - started, 1), exit_code=code, last_line=said)


def _wait(process: "subprocess.Popen[bytes]", end: float, publish: Callable[[], object]) -> int:
    """Returns the exit code; values are published once a second meanwhile. Raises: TimeoutExpired at `end`."""
    while True:
        try:
            return process.wait(timeout=max(0.0, min(1.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            publish()
            if time.monotonic() >= end:
                raise


def _last_line(log: IO[str], begin: int) -> str:
    log.seek(begin)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those that it started and left behind."""
    for request, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, request)
            process.wait(timeout=seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def devices() -> dict[str, Any]:
    """Returns the devices and the versions that PyTorch names in this process."""
    import platform

    import torch

    has_gpu = torch.cuda.is_available()
    nccl: Any = torch.cuda.nccl  # has no annotations
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
        "nccl": ".".join(map(str, nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def examine_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what PyTorch names in a process of its own, and what `nvidia-smi` says of driver and links.

    Raises: RuntimeError where there is no PyTorch.
    """
    command = [sys.executable, "-c", "import json; from gpu_day.runner import devices; print(json.dumps(devices()))"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"PyTorch does not start, and the day installs none: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"driver": driver_version(), "topology": _nvidia_smi("topo", "-m")}


def driver_version() -> str | None:
    """Returns the version of NVIDIA's driver; None where there is none."""
    found = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return found and found.splitlines()[0]


def _nvidia_smi(*words: str) -> str | None:
    """Returns what `nvidia-smi` prints; None where there is none, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def environment_of_steps(*folders: Path | str) -> dict[str, str]:
    """Returns what the steps need of the environment: they import from these folders first, then from the checkout."""
    paths = [*folders, ROOT, ROOT / "benchmarks", ROOT / "tests"]
    given = os.environ.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([given] if given else [])]),
        "PYTHONUNBUFFERED": "1",
    }


def commit_of_checkout() -> str | None:
    """Returns the commit, with `-dirty` where files differ from it; None where the checkout has no history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def short_name(device: str) -> str:
    """Returns a device's name in the names of files: `h200` of `NVIDIA H200`, `h100_pcie` of `NVIDIA H100 PCIe`."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    kept = [one for one in words if not re.fullmatch(r"nvidia|tesla|geforce|amd|instinct|\d+gb|hbm\d\w?|sxm\d?", one)]
    return "_".join(kept) or "gpu"
