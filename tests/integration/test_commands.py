"""The commands one after another, as a user types them; in a slow test a run is killed and resumed (invariant 7)."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Done
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


@pytest.fixture(scope="module")
def trained(run_file: Path) -> Done:
    """Returns what the command said that trained the run on two ranks."""
    return evenpack_process("train", run_file, options=["--cpu-ranks", "2", "--json"])


def wait_for_step(process: "subprocess.Popen[str]", output: Path, step: int) -> None:
    path = output / "metrics.jsonl"
    while not path.exists() or path.read_text().count("learning_rate") < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def rank_process(output: Path, rank: int) -> int:
    """Returns the pid of a rank from its status file."""
    (status,) = (output / "ranks").rglob(f"rank_{rank}.json")
    return int(json.loads(status.read_text())["process"]["pid"])


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_by_name_and_the_next_start_resumes_bit_for_bit(
    run_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "killed"
    elsewhere = f"run.output_dir={output}"
    process = subprocess.Popen(
        [*COMMAND, "train", "--cpu-ranks", "2", str(run_file), elsewhere],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for_step(process, output, 5)
    os.kill(rank_process(output, 1), signal.SIGKILL)
    text, _ = process.communicate(timeout=HANGS_SECONDS)
    assert process.returncode not in (0, 75)
    assert "rank 1" in text
    assert 5 <= len(metrics(output)) < STEPS, "a run that was through would have nothing to go on with"
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a torn line, as a kill in the middle of writing leaves it
    resumed = evenpack_process("train", run_file, elsewhere, options=["--cpu-ranks", "2", "--json"])
    require_finished(resumed, output)
    straight = changed(load_run_file(run_file, RunConfig), run={"output_dir": tmp_path / "straight"})
    run_ranks(train_on, 2, straight)
    assert_same_run(output, straight.run.output_dir)
    value = json.loads(evenpack("report", run_file, elsewhere, options=["--json", "--output", str(tmp_path)]).stdout)
    assert [row["steps"] for row in value["runs"]] == [str(STEPS)]
    assert "went on after step" in value["notes"][0], "it was stopped, and started again"


def require_finished(done: Done, output: Path) -> dict[str, Any]:
    """Checks what is said and left by a command that has trained the run to its end; returns its report."""
    value = json.loads(done.stdout)
    report: dict[str, Any] = value["report"]
    assert f"step {STEPS}/{STEPS}" in done.stderr
    for begun in ("importing torch and DeepSpeed, then joining 2 ranks\n", "2 ranks joined; opening the data"):
        assert done.stderr.count(begun) == 1
    assert (value["state"], report["step"]) == ("finished", STEPS)
    assert not (output / ".stop").exists()
    states = [json.loads(path.read_text())["state"] for path in (output / "ranks").glob("rank_*.json")]
    assert states == ["finished"] * 2
    return report


def test_train_ends_with_the_numbers_of_the_run(run_file: Path, trained: Done) -> None:
    output = run_file.parent / "out"
    report = require_finished(trained, output)
    assert 0.9 < report["packing_efficiency"] <= 1
    assert report["packing_factor"] > 1
    assert report["last_loss"] == losses(output)[-1] < report["first_loss"]
    assert set(report["validation"]) == {"one", "two"}


def test_report_takes_a_run_file_or_a_folder_and_draws_it(run_file: Path, trained: Done, tmp_path: Path) -> None:
    value = json.loads(evenpack("report", run_file, options=["--json", "--output", str(tmp_path)]).stdout)
    assert [(row["run"], row["steps"]) for row in value["runs"]] == [("small", str(STEPS))]
    assert value["figure"] == str(tmp_path / "report.png")
    assert Path(value["figure"]).read_bytes().startswith(b"\x89PNG")
    done = evenpack("report", run_file.parent / "data", expected=2)
    assert "data holds no metrics.jsonl" in done.stderr


def test_evaluate_finds_the_losses_that_training_has_seen(run_file: Path, trained: Done) -> None:
    values = json.loads(evenpack("evaluate", run_file, options=["--json"]).stdout)
    assert values["step"] == STEPS
    for source, found in json.loads(trained.stdout)["report"]["validation"].items():
        assert values["sources"][source]["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_transformers_loads_what_export_writes(run_file: Path, trained: Done) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    directory = run_file.parent / "exported"
    done = evenpack("export", run_file, str(directory), options=["--json"])
    assert json.loads(done.stdout) == {"directory": str(directory), "step": STEPS, "tokenizer": True}
    model = GPT2LMHeadModel.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.n_layer == 2
