"""The commands one after another, as a user types them; one run is killed and resumed (invariant 7)."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from run_files import changed
from small_run import (
    COMMAND,
    HANGS_SECONDS,
    STEPS,
    assert_same_run,
    evenpack,
    evenpack_process,
    losses,
    metrics,
    train_on,
    write_run,
)

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares a run."""
    path = write_run(tmp_path_factory.mktemp("commands"))
    evenpack("prepare", path)
    return path


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Trains a run on two ranks whose second rank is killed, and starts the same command again."""

    killed_code: int
    killed_text: str
    done_at_kill: int
    """Steps."""
    value: dict[str, Any]
    """What `--json` printed at the end."""
    messages: str


@pytest.fixture(scope="module")
def trained(run_file: Path) -> Trained:
    output = run_file.parent / "out"
    process = subprocess.Popen(
        [*COMMAND, "train", "--cpu-ranks", "2", str(run_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for_step(process, output, 5)
    os.kill(rank_process(output, 1), signal.SIGKILL)
    text, _ = process.communicate(timeout=HANGS_SECONDS)
    done_at_kill = len(metrics(output))
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a torn line, as a kill in the middle of writing leaves it
    done = evenpack_process("train", run_file, options=["--cpu-ranks", "2", "--json"])
    return Trained(
        killed_code=process.returncode,
        killed_text=text,
        done_at_kill=done_at_kill,
        value=json.loads(done.stdout),
        messages=done.stderr,
    )


def wait_for_step(process: "subprocess.Popen[str]", output: Path, step: int) -> None:
    path = output / "metrics.jsonl"
    while not path.exists() or path.read_text().count("learning_rate") < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def rank_process(output: Path, rank: int) -> int:
    """Returns the pid of a rank from its status file."""
    (status,) = (output / "ranks").rglob(f"rank_{rank}.json")
    return int(json.loads(status.read_text())["process"]["pid"])


def test_a_killed_rank_ends_the_run_by_name(trained: Trained) -> None:
    assert trained.killed_code not in (0, 75)
    assert "rank 1" in trained.killed_text
    assert 5 <= trained.done_at_kill < STEPS, "a run that was through would have nothing to go on with"


def test_the_next_start_resumes_bit_for_bit(run_file: Path, trained: Trained) -> None:
    straight = changed(load_run_file(run_file, RunConfig), run={"output_dir": run_file.parent / "straight"})
    run_ranks(train_on, 2, straight)
    assert_same_run(run_file.parent / "out", straight.run.output_dir)


def test_train_ends_with_the_numbers_of_the_run(run_file: Path, trained: Trained) -> None:
    report, output = trained.value["report"], run_file.parent / "out"
    assert f"step {STEPS}/{STEPS}" in trained.messages
    for begun in ("importing torch and DeepSpeed, then joining 2 ranks\n", "2 ranks joined; opening the data"):
        assert trained.messages.count(begun) == 1
    assert (trained.value["state"], report["step"]) == ("finished", STEPS)
    assert 0.9 < report["packing_efficiency"] <= 1
    assert report["packing_factor"] > 1
    assert report["last_loss"] == losses(output)[-1] < report["first_loss"]
    assert set(report["validation"]) == {"one", "two"}
    assert not (output / ".stop").exists()
    assert [json.loads(path.read_text())["state"] for path in (output / "ranks").glob("rank_*.json")] == [
        "finished"
    ] * 2


def test_report_takes_a_run_file_or_a_folder_and_draws_it(run_file: Path, trained: Trained, tmp_path: Path) -> None:
    value = json.loads(evenpack("report", run_file, options=["--json", "--output", str(tmp_path)]).stdout)
    assert [(row["run"], row["steps"]) for row in value["runs"]] == [("small", str(STEPS))]
    assert value["figure"] == str(tmp_path / "report.png")
    assert Path(value["figure"]).read_bytes().startswith(b"\x89PNG")
    assert "went on after step" in value["notes"][0], "it was stopped, and started again"
    done = evenpack("report", run_file.parent / "data", expected=2)
    assert "data holds no metrics.jsonl" in done.stderr


def test_evaluate_finds_the_losses_that_training_has_seen(run_file: Path, trained: Trained) -> None:
    values = json.loads(evenpack("evaluate", run_file, options=["--json"]).stdout)
    assert values["step"] == STEPS
    for source, found in trained.value["report"]["validation"].items():
        assert values["sources"][source]["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_transformers_loads_what_export_writes(run_file: Path, trained: Trained) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    directory = run_file.parent / "exported"
    done = evenpack("export", run_file, str(directory), options=["--json"])
    assert json.loads(done.stdout) == {"directory": str(directory), "step": STEPS, "tokenizer": True}
    model = GPT2LMHeadModel.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.n_layer == 2
