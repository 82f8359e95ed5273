"""Provides a real run that takes seconds, and runs the command line in this process or in another one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import torch
from command_line import Done
from run_files import RunValues, run_values, write_run_file

from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World

EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "targets", "order_hash")
"""Of each step, to the bit."""

COMMAND = (sys.executable, "-m", "evenpack.launcher.cli")
STEPS = 12

HANGS_SECONDS = 1200
"""Only a command that hangs takes so long, on a busy machine too."""

WORDS = ["pack", "sequence", "rank", "step", "equal", "whole", "slot", "order", "seed", "every", "same", "none"]


def write_corpus(path: Path, *, documents: int, first: int) -> None:
    """Writes documents of very unequal length, each with words of its own."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + documents):
            file.write(json.dumps({"text": document(number)}) + "\n")


def document(number: int) -> str:
    """Returns one of the documents."""
    length = 3 + (number * number * 7919) % (400 if number % 9 == 0 else 60)
    return " ".join(f"{WORDS[(number + i * i) % len(WORDS)]}{(number * i) % 13}" for i in range(length))


def small_run_values(folder: Path) -> RunValues:
    """Returns a run over two sources; its output is in folder/out and its data in folder/data."""
    write_corpus(folder / "one.jsonl", documents=240, first=0)
    write_corpus(folder / "two.jsonl", documents=90, first=1000)
    return run_values(
        "gpt2",
        folder,
        run={"seed": 5},
        data={
            "sources": {
                "one": {"kind": "jsonl", "path": str(folder / "one.jsonl"), "weight": 2},
                "two": {"kind": "jsonl", "path": str(folder / "two.jsonl"), "weight": 1},
            },
            "validation_fraction": 0.1,
            "tokenizer": {"kind": "train", "vocabulary_size": 400},
            "recipe": {"kind": "documents", "max_sequence_length": 64},
            "pack_length": 64,
        },
        model={"dropout": 0.1},
        training={"steps": STEPS, "evaluate_every_steps": 4, "evaluation_packs": 12, "checkpoint_every_steps": 4},
        schedule={"warmup_steps": 2},
    )


def write_run(folder: Path) -> Path:
    """Writes the run file of `small_run_values`."""
    return write_run_file(folder / "run.yaml", small_run_values(folder))


def evenpack(
    command: str, run_file: Path, *overrides: str, options: Sequence[str] = (), expected: int = 0, **environment: str
) -> Done:
    """Runs an evenpack command in this process, which has the imports, and checks its exit code."""
    done = command_line.evenpack(*command.split(), *options, run_file, *overrides, **environment)
    assert done.code == expected, f"exit code {done.code}\n{done.stdout}\n{done.stderr}"
    return done


def evenpack_process(
    command: str, run_file: Path, *overrides: str, options: Sequence[str] = (), expected: int = 0
) -> Done:
    """Runs an evenpack command as a user does, in a process of its own, and checks its exit code."""
    return process([*COMMAND, *command.split(), *options, str(run_file), *overrides], expected=expected)


def process(command: Sequence[str], *, expected: int = 0, **environment: str) -> Done:
    """Runs any command to its end and checks its exit code."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == expected, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Done(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Returns all records of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def steps(output_dir: Path, *fields: str) -> list[tuple[Any, ...]]:
    """Returns the given fields of each training step."""
    return [tuple(record[name] for name in fields) for record in metrics(output_dir)]


def losses(output_dir: Path) -> list[float]:
    return [loss for (loss,) in steps(output_dir, "loss")]


def final_weights(output_dir: Path) -> dict[str, torch.Tensor]:
    return saved_tensors(read_manifest(output_dir / "checkpoints" / f"step_{STEPS:06d}")).weights()


def assert_same_run(output_dir: Path, other: Path) -> None:
    """Checks that two runs have the same steps and final weights, bit for bit."""
    assert steps(output_dir, *EXACT) == steps(other, *EXACT)
    expected = final_weights(other)
    for name, tensor in final_weights(output_dir).items():
        assert torch.equal(tensor, expected[name]), name


def train_on(world: World, *configs: RunConfig) -> None:
    """Trains one run after another, for `run_ranks`."""
    from evenpack.engine.train import train_in  # imports DeepSpeed, which ranks alone do

    for config in configs:
        train_in(world, config, stop_requested=_never)


def _never() -> bool:
    return False
