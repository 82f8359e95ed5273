"""Measures how long a run takes to its first step and from its last one to the prompt, in pairs with transformers.

    python benchmarks/start_and_end.py RUN.yaml [--steps 5] [--rounds 5] [--accelerate DIR] [--json FILE]
                                                [key=value ...]

A round starts `evenpack train` and transformers' Trainer under `torchrun` one after the other, each on one CPU rank,
and in the next round in the other order. The run's data must be prepared, and its model be a GPT-2; the Trainer gets
one of the same layers, hidden size, heads, vocabulary and positions, rows of `data.pack_length` random tokens, as many
as a step has packs, and as many loader processes. Both save at their last step. `fresh` begins at step 1; `resumed` is
the same command again, which goes on from that checkpoint for as many steps. Times are those at which this process sees
the first and the last step recorded (it looks every 5 ms), and the command's end; CPU seconds are of all its processes.

transformers' Trainer needs accelerate: `pip install --no-deps --target DIR accelerate` keeps it from the environment.
Measure on a quiet machine; on a busy one only the CPU seconds say something.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Seconds = dict[str, float]

PARTS = ("to the end of the first step", "between them", "from the last step to the prompt", "whole", "CPU")
"""What is measured, in seconds."""

_POLL_SECONDS = 0.005


def main() -> None:
    if sys.argv[1:2] == ["--trainer"]:  # this file as what torchrun starts
        train_by_transformers(json.loads(sys.argv[2]))
        return
    import measuring  # not by the file that torchrun starts, which is timed

    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--steps", type=int, default=5, help="of each start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accelerate", type=Path, help="folder that holds the package, if it is not installed")
    arguments = parser.parse_intermixed_args()
    found: dict[str, dict[str, list[Seconds]]] = {"fresh": {}, "resumed": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + arguments.rounds):
            names = ("evenpack", "transformers") if number % 2 else ("transformers", "evenpack")
            for name in names:
                output = Path(folder) / name
                shutil.rmtree(output, ignore_errors=True)
                for start, starts in (("fresh", 1), ("resumed", 2)):
                    seconds = STARTERS[name](arguments, output, arguments.steps * starts)
                    if number > 0:  # the first fills the caches of files
                        found[start].setdefault(name, []).append(seconds)
    report = {"machine": machine(), "steps": arguments.steps, "rounds": arguments.rounds, "seconds": found}
    show(found)
    measuring.write_report(report, arguments.json)


def show(found: dict[str, dict[str, list[Seconds]]]) -> None:
    """Prints medians of both, and of their differences within a round."""
    print(f"{'medians, s':48}{'evenpack':>10}{'Trainer':>10}{'difference':>12}")
    for start, by_name in found.items():
        pairs = list(zip(by_name["evenpack"], by_name["transformers"], strict=True))
        for part in PARTS:
            ours, theirs = ([one[part] for one in by_name[name]] for name in ("evenpack", "transformers"))
            difference = statistics.median(a[part] - b[part] for a, b in pairs)
            middles = f"{statistics.median(ours):10.2f}{statistics.median(theirs):10.2f}{difference:+12.2f}"
            print(f"{start + ', ' + part:48}{middles}")


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    from evenpack.engine.provenance import commit_of_source

    packages = ("torch", "deepspeed", "transformers")
    return {
        "commit": commit_of_source(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def start_evenpack(arguments: argparse.Namespace, output: Path, last_step: int) -> Seconds:
    values = [f"run.output_dir={output}", f"training.stop_after_steps={last_step}", *arguments.overrides]
    if not any(value.startswith("data.prepared_dir=") for value in values):
        values.append(f"data.prepared_dir={config_of(arguments).prepared_dir}")
    command = [sys.executable, "-m", "evenpack.launcher.cli", "train", str(arguments.run_file), "--cpu-ranks=1"]
    return timed([*command, *values], output / "metrics.jsonl", steps=arguments.steps, environment={})


def start_transformers(arguments: argparse.Namespace, output: Path, last_step: int) -> Seconds:
    from evenpack.engine.resolving.resolve import open_run

    run = open_run(config_of(arguments))
    config = run.config
    if config.model.kind != "gpt2":
        raise SystemExit(f"model.kind is {config.model.kind}: the Trainer is given a GPT-2")
    task = {
        "output": str(output),
        "model": {
            "n_layer": config.model.shape["layers"],
            "n_embd": config.model.shape["hidden_size"],
            "n_head": config.model.shape["heads"],
            "n_positions": run.config.max_positions,
            "vocab_size": run.prepared.vocabulary_size,
        },
        "length": run.prepared.pack_length,
        "rows": config.training.items_per_micro_batch,
        "accumulation": run.settled.micro_batches(1),
        "workers": config.training.loader_workers,
        "learning_rate": config.optimizer.learning_rate,
        "steps": arguments.steps,
        "last_step": last_step,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    paths = [str(arguments.accelerate)] if arguments.accelerate else []
    environment = {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),  # as evenpack gives its one rank
        "HF_HUB_OFFLINE": "1",
    }
    command = [*torchrun, __file__, "--trainer", json.dumps(task)]
    return timed(command, output / "steps", steps=arguments.steps, environment=environment)


STARTERS = {"evenpack": start_evenpack, "transformers": start_transformers}


def config_of(arguments: argparse.Namespace) -> Any:
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig

    return load_run_file(arguments.run_file, RunConfig, arguments.overrides)


def timed(command: Sequence[str], record: Path, *, steps: int, environment: dict[str, str]) -> Seconds:
    """Runs a command that appends a line to `record` after each of its steps."""
    lines_before = lines_of(record)
    seen: list[float] = []
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            ended = time.perf_counter()
            seen += [ended] * (lines_of(record) - lines_before - len(seen))
            if pid:
                break
            time.sleep(_POLL_SECONDS)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or len(seen) != steps:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise SystemExit(f"expected {steps} steps and exit code 0, found {len(seen)} and {process.returncode}")
    times = (seen[0] - started, seen[-1] - seen[0], ended - seen[-1], ended - started, usage.ru_utime + usage.ru_stime)
    return dict(zip(PARTS, times, strict=True))


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def train_by_transformers(task: dict[str, Any]) -> None:
    """Trains as one rank, and appends a line to OUTPUT/steps after each step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Record(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            with (Path(task["output"]) / "steps").open("a") as file:
                file.write(f"{state.global_step}\n")

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            row = torch.randint(task["model"]["vocab_size"], (task["length"],), generator=generator)
            return {"input_ids": row, "labels": row}

    Path(task["output"]).mkdir(exist_ok=True)
    settings = TrainingArguments(
        output_dir=task["output"],
        per_device_train_batch_size=task["rows"],
        gradient_accumulation_steps=task["accumulation"],
        dataloader_num_workers=task["workers"],
        learning_rate=task["learning_rate"],
        max_steps=task["last_step"],
        save_steps=task["steps"],
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(**task["model"]))
    trainer = Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[Record()])
    trainer.train(resume_from_checkpoint=task["last_step"] > task["steps"])


if __name__ == "__main__":
    main()
