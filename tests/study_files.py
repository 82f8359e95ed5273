"""Provides study files for tests, and a machine that only pretends to train."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from run_files import run_values, write_run_file

from evenpack.data.manifest import MANIFEST
from evenpack.finetuning.results import ResultFolder, SeedResult, summarise
from evenpack.progress import Progress
from evenpack.studies.runs.jobs import Job
from evenpack.studies.runs.runner import EndedRun, train_runs

STEPS = 4


def write_study(folder: Path, **changes: Any) -> Path:
    """Writes two phases over a run file beside it: one run, then two arms with two seeds each."""
    write_run_file(folder / "base.yaml", run_values("gpt2", folder, data={"prepared_dir": None}))
    study = {
        "study": {"name": "small", "output_dir": str(folder / "study")},
        "phases": {
            "first": {"base": "base.yaml", "seeds": [7], "arms": {"unpacked": {"training.layout": "padded"}}},
            "second": {
                "base": "base.yaml",
                "starts_from": "first",
                "settings": {"training.steps": STEPS},
                "seeds": [1, 2],
                "arms": {"unpacked": {"training.layout": "padded"}, "packed": {}},
            },
        },
        "equivalence": {"reference": "unpacked", "margin": 0.1},
        **changes,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


@dataclass(frozen=True, kw_only=True)
class Call:
    """A command that a study has started."""

    command: str
    overrides: dict[str, Any]
    at_once: int
    """Commands under way, this one counted."""
    options: tuple[str, ...]

    @property
    def run(self) -> str:
        """Returns the key PHASE/ARM/seed_N."""
        name: str = self.overrides["run.name"]
        return name.partition("/")[2]


@dataclass(kw_only=True)
class FakeProcess:
    """Ends at the second poll."""

    end: Callable[[], int]
    looks: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == 2:
            self.code = self.end()
        return self.code


@dataclass(kw_only=True)
class FakeMachine:
    """A machine that starts nothing; `codes` has the exit codes of runs by key, all others succeed."""

    place_count: int = 1
    codes: dict[str, int] = field(default_factory=dict)
    stops_after: int | None = None
    """Calls until the user asks to stop."""
    calls: list[Call] = field(default_factory=list)
    active: int = 0
    ranks: int = 1

    @property
    def is_stop_requested(self) -> bool:
        return self.stops_after is not None and len(self.calls) >= self.stops_after

    def device_groups(self, devices_per_run: int | None) -> Sequence["FakeMachine"]:
        return [self] * self.place_count

    @contextmanager
    def held(self, output_dir: Path) -> Iterator[None]:
        yield

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> FakeProcess:
        values = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in overrides)}
        self.active += 1
        call = Call(command=command, overrides=values, at_once=self.active, options=tuple(options))
        self.calls.append(call)
        return FakeProcess(end=lambda: self._end(call, log))

    def _end(self, call: Call, log: Path) -> int:
        self.active -= 1
        code = self.codes.get(call.run if call.command in ("train", "finetune") else call.command, 0)
        output_dir = Path(call.overrides["run.output_dir"])
        if code:
            with log.open("a") as file:
                file.write("step 1\nerror: there is no such\nthing\n")
        elif call.command == "prepare":
            directory = Path(call.overrides["data.prepared_dir"])
            directory.mkdir(parents=True)
            (directory / MANIFEST).write_text("{}")
        elif call.command == "evaluate":
            Path(call.options[1]).write_text("{}")
        elif call.command == "train":
            write_log(output_dir, losses=[5.0, 4.0, 3.0, 2.0])
        else:
            write_tuned(output_dir, {seed: 0.5 + seed / 100 for seed in call.overrides["run.seeds"]})
        return code


def end_jobs(jobs: Sequence[Job], machine: FakeMachine, **options: Any) -> dict[str, EndedRun]:
    """Lets a machine do what is left to do; returns how each job has ended, by its key."""
    with Progress(Console(), silent=True) as progress:
        ended = train_runs(jobs, machine, machine.device_groups(None), progress, **options)
    return {one.run.key: one for one in ended}


def write_tuned(output_dir: Path, accuracies: Mapping[int, float]) -> None:
    """Writes the results of `evenpack finetune`, by seed."""
    folder = ResultFolder(output_dir)
    results = [seed_result(seed, accuracy) for seed, accuracy in accuracies.items()]
    output_dir.mkdir(parents=True, exist_ok=True)
    for result in results:
        folder.write(result)
    guesses = {"dev": {"accuracy": 0.5}}
    folder.write_summary(summarise("SST-2", "accuracy", results, settings={}, guesses=guesses))


def seed_result(seed: int, accuracy: float) -> SeedResult:
    """Returns a fine-tuning of one step."""
    return SeedResult(
        seed=seed,
        metrics={"dev": {"accuracy": accuracy}},
        intervals={"dev": {"accuracy": (accuracy - 0.1, accuracy + 0.1)}},
        metrics_by_epoch=[{"dev": {"accuracy": accuracy}}],
        losses_by_epoch=[1.0],
        steps=1,
        sequences_per_step=8.0,
        least_sequences_per_step=8,
        most_sequences_per_step=8,
        packs_per_step=2.0,
        sequences_per_pack=4.0,
        padding_share=0.1,
        training_seconds=1.0,
        sequences_per_second=8.0,
    )


def write_log(output_dir: Path, *, losses: Sequence[float], sequences: int = 10) -> None:
    """Writes a metrics.jsonl with an evaluation every second step."""
    output_dir.mkdir(parents=True, exist_ok=True)
    records = []
    for step, loss in enumerate(losses, start=1):
        record = {
            "step": step,
            "loss": loss,
            "targets": 5,
            "sequences": sequences,
            "slots": 32 * sequences,
            "step_seconds": 1.0,
            "host_to_device_bytes": 100 * sequences,
        }
        if step % 2 == 0:
            values = {"loss": loss, "accuracy": 1 / loss, "targets": 30, "sequences": 3}
            record["validation"] = {"text": values, "nothing_held_out": None}
        records.append(record)
    (output_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
