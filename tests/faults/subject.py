"""The small run on which faults are tried."""

import atexit
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
import xxhash
import yaml

from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.launch_environment import free_port

Stack = Literal["evenpack train", "deepspeed", "torchrun", "mpirun", "python"]

STEPS = 240
CHECKPOINT_EVERY = 10
HANG_TIMEOUT_SECONDS = 32
"""So that a run which hangs ends within the minute that is promised."""
START_TIMEOUT_SECONDS = 120
"""Several times what a start takes, 20 s."""

SUBJECT_VARIABLE = "FAULT_SUBJECT"
"""Variable in the environment of every process of a run, by which the processes that it leaves are found."""

_TESTS = Path(__file__).absolute().parents[1]
_BIN = Path(sys.executable).parent
_WORKER = "evenpack.launcher.worker"
_SPOILED_WORKER = "faults.spoiled_worker"
_HANGS_SECONDS = 900.0
_DOCUMENTS = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a run is started."""

    stack: Stack
    ranks: int
    zero_stage: int

    def __str__(self) -> str:
        return f"{self.stack}, {self.ranks} ranks, ZeRO {self.zero_stage}"


CASES = (
    Case(stack="evenpack train", ranks=2, zero_stage=0),
    Case(stack="evenpack train", ranks=2, zero_stage=1),
    Case(stack="evenpack train", ranks=2, zero_stage=3),
    Case(stack="deepspeed", ranks=2, zero_stage=2),
    Case(stack="torchrun", ranks=2, zero_stage=0),
    Case(stack="python", ranks=1, zero_stage=0),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run has computed, to the bit."""

    weights: str
    """Checksum of all weights."""
    steps: dict[int, tuple[Any, ...]]
    """Order hash, loss and tokens of each step."""

    def equals(self, other: "Result", *, after: int) -> bool:
        """Returns whether weights, and all steps after one, are the same."""
        mine, others = ({step: one for step, one in x.steps.items() if step > after} for x in (self, other))
        return self.weights == other.weights and mine == others


@dataclass(frozen=True, kw_only=True)
class SubjectRun:
    """One run in a folder of its own: its run file, its data and its output."""

    folder: Path
    case: Case

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def output_dir(self) -> Path:
        return self.folder / "out"

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    def command(self, *, spoiled: bool = False) -> list[str]:
        """Returns the command that starts the run; `spoiled`: by a worker that makes a loss NaN."""
        worker, file = _SPOILED_WORKER if spoiled else _WORKER, str(self.run_file)
        ranks = str(self.case.ranks)
        if self.case.stack == "deepspeed":
            options = ["--log_level=critical", f"--num_gpus={ranks}", f"--master_port={free_port()}"]
            return [str(_BIN / "deepspeed"), *options, "--module", worker, file]
        if self.case.stack == "evenpack train":
            return [sys.executable, "-m", "evenpack.launcher.cli", "train", file, "--cpu-ranks", ranks]
        if self.case.stack == "torchrun":
            rendezvous = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
            return [str(_BIN / "torchrun"), *rendezvous, f"--nproc-per-node={ranks}", "-m", worker, file]
        if self.case.stack == "mpirun":
            port = f"MASTER_PORT={free_port()}"
            options = ["--allow-run-as-root", "--oversubscribe", "-x", port, "-n", ranks]
            return [str(_BIN / "mpirun"), *options, sys.executable, "-m", worker, file]
        return [sys.executable, "-m", worker, file]

    def spoiled(self) -> "SubjectRun":
        """Returns the run as it is started where its worker is replaced, which `evenpack train` does not allow."""
        return replace(self, case=replace(self.case, stack="deepspeed"))

    def at(self, case: Case) -> "SubjectRun":
        """Returns the run as it goes on with other ranks, at another ZeRO stage."""
        values = yaml.safe_load(self.run_file.read_text())
        values["deepspeed"]["zero_stage"] = case.zero_stage
        self.run_file.write_text(yaml.safe_dump(values, sort_keys=False))
        return replace(self, case=case)

    def environment(self) -> dict[str, str]:
        return environment_of(self.folder)

    def last_saved(self) -> int:
        """Returns the step of the newest checkpoint by name; 0 without one."""
        return max((int(path.name.partition("_")[2]) for path in listed(self.checkpoints, "step_*")), default=0)

    def result(self) -> Result:
        """Returns what a finished run has computed."""
        lines = (self.output_dir / "metrics.jsonl").read_bytes().splitlines()
        records = [json.loads(line) for line in lines]
        steps = {one["step"]: (one["order_hash"], one["loss"], one["tokens"]) for one in records}
        weights = saved_tensors(read_manifest(self.checkpoints / f"step_{STEPS:06d}")).weights()
        return Result(weights=weights_checksum(weights), steps=steps)


class Subject:
    """The data, and what an undisturbed run computes with it."""

    def __init__(self, folder: Path) -> None:
        """Prepares the data."""
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._source = write_source(folder)
        self._prepared = self.new_run("prepared", CASES[0], copy_data=False)
        prepare = [sys.executable, "-m", "evenpack.launcher.cli", "prepare", str(self._prepared.run_file)]
        run_to_end(prepare, self._prepared.environment())
        self.reference = cache(self._reference)

    def new_run(self, name: str, case: Case, *, within: Path | None = None, copy_data: bool = True) -> SubjectRun:
        """Returns a run that has not started; `within`: a folder for it other than that of all."""
        run = SubjectRun(folder=(within or self._folder) / name, case=case)
        shutil.rmtree(run.folder, ignore_errors=True)
        run.folder.mkdir(parents=True)
        write_run(run.folder, self._source, zero_stage=case.zero_stage)
        if copy_data:
            shutil.copytree(self._prepared.data_dir, run.data_dir)
        return run

    def _reference(self, ranks: int, zero_stage: int) -> Result:
        """Returns the result of a run that nothing disturbs."""
        stack: Stack = "python" if ranks == 1 else "torchrun"
        case = Case(stack=stack, ranks=ranks, zero_stage=zero_stage)
        run = self.new_run(f"undisturbed_{ranks}_{zero_stage}", case)
        run_to_end(run.command(), run.environment())
        return run.result()


def write_source(folder: Path) -> Path:
    """Writes a part of Python's own help as documents, unless it is there: prepared data names its date."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "topics.jsonl"
    if path.exists():
        return path
    texts = list(topics.values())[:_DOCUMENTS]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_run(folder: Path, source: Path, *, zero_stage: int = 0, grid: bool = False) -> Path:
    """Writes a run file over a source; returns it."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(_values(folder, source, zero_stage=zero_stage, grid=grid), sort_keys=False))
    return file


def _values(folder: Path, source: Path, *, zero_stage: int, grid: bool) -> dict[str, Any]:
    """Returns the run file as values. It has dropout, so that random numbers are part of the result."""
    data: dict[str, Any] = {
        "prepared_dir": str(folder / "data"),
        "sources": {"topics": {"kind": "jsonl", "path": str(source)}},
        "validation_fraction": 0.05,
        "tokenizer": {"kind": "train", "vocabulary_size": 400},
        "recipe": {"kind": "documents", "max_sequence_length": 64},
        "pack_length": 64,
    }
    if grid:
        data["shuffle"] = {"kind": "grid", "rows": 4, "columns": 5, "block_tokens": 2000}
    return {
        "run": {
            "name": "subject",
            "output_dir": str(folder / "out"),
            "seed": 11,
            "hang_timeout_seconds": HANG_TIMEOUT_SECONDS,
            "start_timeout_seconds": START_TIMEOUT_SECONDS,
        },
        "data": data,
        "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32, "heads": 2, "dropout": 0.1},
        "training": {
            "packs_per_step": 8,
            "packs_per_micro_batch": 2,
            "steps": STEPS,
            "checkpoint_every_steps": CHECKPOINT_EVERY,
            "evaluate_every_steps": 50,
            "evaluation_packs": 4,
            "loader_workers": 1,
            "precision": "fp32",
        },
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 10},
        "deepspeed": {"zero_stage": zero_stage},
    }


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns what is in a folder that may move meanwhile."""
    with suppress(OSError):
        return sorted(folder / name for name in fnmatch.filter(os.listdir(folder), pattern))  # noqa: PTH208 - glob fails
    return []


def paths_below(folder: Path) -> list[Path]:
    """Returns all files and folders below one, of which some may move meanwhile: a running program renames its own."""
    found = ((Path(top), [*folders, *files]) for top, folders, files in os.walk(folder))  # which passes errors over
    return sorted(top / name for top, names in found for name in names)


@cache
def _temporary() -> Path:
    """Returns a folder with a short name, because it holds sockets."""
    folder = tempfile.mkdtemp(prefix="faults_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def temporary_dir(folder: Path) -> Path:
    """Returns the folder for temporary files of a run in `folder`."""
    path = _temporary() / xxhash.xxh3_64_hexdigest(str(folder).encode())
    path.mkdir(exist_ok=True)
    return path


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment of all processes of a run in `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TMPDIR": str(temporary_dir(folder)),
        SUBJECT_VARIABLE: str(folder),
    }


def run_to_end(command: Sequence[str], environment: dict[str, str]) -> None:
    """Runs a command that must succeed."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_HANGS_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")


def weights_checksum(weights: dict[str, torch.Tensor]) -> str:
    """Returns one checksum of all tensors, by their names."""
    found = xxhash.xxh3_128()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()
