"""A run that is real in every part and takes seconds: files of text, a trained tokenizer, DeepSpeed on the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

EVENPACK = Path(sys.executable).parent / "evenpack"
STEPS = 12

WORDS = ["pack", "sequence", "rank", "step", "equal", "whole", "slot", "order", "seed", "every", "same", "none"]


def write_corpus(path: Path, *, documents: int, first: int) -> None:
    """Documents of very unequal length, each of its own words."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + documents):
            length = 3 + (number * number * 7919) % (400 if number % 9 == 0 else 60)
            words = [f"{WORDS[(number + i * i) % len(WORDS)]}{(number * i) % 13}" for i in range(length)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def write_run(folder: Path) -> Path:
    """A run file over two sources; its output goes to folder/out and its data to folder/data."""
    write_corpus(folder / "one.jsonl", documents=240, first=0)
    write_corpus(folder / "two.jsonl", documents=90, first=1000)
    values: dict[str, Any] = {
        "run": {"name": "small", "output_dir": str(folder / "out"), "seed": 5},
        "data": {
            "prepared_dir": str(folder / "data"),
            "sources": {
                "one": {"kind": "jsonl", "path": str(folder / "one.jsonl"), "weight": 2},
                "two": {"kind": "jsonl", "path": str(folder / "two.jsonl"), "weight": 1},
            },
            "validation_fraction": 0.1,
            "tokenizer": {"kind": "train", "vocabulary_size": 400},
            "recipe": {"kind": "documents", "max_sequence_length": 64},
            "pack_length": 64,
        },
        "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32, "dropout": 0.1},
        "training": {
            "packs_per_step": 8,
            "packs_per_micro_batch": 2,
            "steps": STEPS,
            "evaluate_every_steps": 4,
            "checkpoint_every_steps": 4,
            "precision": "fp32",
            "loader_workers": 0,
        },
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup_steps": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def evenpack(
    command: str, run_file: Path, *overrides: str, options: Sequence[str] = (), expected: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs an evenpack command and checks its exit code."""
    done = subprocess.run(
        [str(EVENPACK), *command.split(), *options, str(run_file), *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == expected, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def worker(run_file: Path, *overrides: str) -> None:
    """One rank without a launcher: `python -m evenpack.launcher.worker`."""
    done = subprocess.run(
        [sys.executable, "-m", "evenpack.launcher.worker", str(run_file), *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """All records of a run."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def steps(output_dir: Path, *fields: str) -> list[tuple[Any, ...]]:
    """The given fields of each training step."""
    return [tuple(record[name] for name in fields) for record in metrics(output_dir)]
