"""Bad input has a message that names the mistake, exit code 2, and leaves no half-written files."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import evenpack
from run_files import run_values, write_run_file
from tiny_run import lone_world

from evenpack.config import load_run_file
from evenpack.data.prepare.prepare import prepare as prepare_data
from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.launcher.trained import load_trained_model


def refuse(*arguments: str) -> str:
    """Runs a command that must end with exit code 2, without standard output and traceback; returns the message."""
    code, out, message = evenpack(*arguments)
    assert code == 2, message
    assert out == ""
    assert "error: " in message
    assert "Traceback" not in message
    return message.partition("error: ")[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a run of valid documents; returns the current folder."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    write_run(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the run for two steps, in one process."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        write_text(folder)
        write_run(folder)
        prepare(folder)
        config = load_run_file(folder / "run.yaml", RunConfig, ["training.stop_after_steps=2"])
        with lone_world() as world:
            train_in(world, config, stop_requested=lambda: False)
    return folder


@pytest.fixture
def trained(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to `trained_folder`, in which tests change only files of their own."""
    monkeypatch.chdir(trained_folder)
    return trained_folder


def write_text(folder: Path) -> None:
    lines = [json.dumps({"text": f"some words of document {number} " * (1 + number % 5)}) for number in range(120)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")


def write_run(folder: Path, **changes: object) -> None:
    """Writes run.yaml; `changes` replace keys of its data section."""
    data = {
        "prepared_dir": None,
        "sources": {"wiki": {"kind": "jsonl", "path": "text.jsonl"}},
        "validation_fraction": 0.1,
        "tokenizer": {"kind": "train", "vocabulary_size": 300},
    }
    values = run_values("gpt2", Path(), data=data | changes, training={"steps": 4})
    write_run_file(folder / "run.yaml", values)


def prepare(folder: Path) -> None:
    config = load_run_file(folder / "run.yaml", RunConfig)
    prepare_data(config.data, folder / "out" / "data")


def test_a_rank_tells_an_option_of_another_program_its_key(folder: Path) -> None:
    code, message = work("--local_rank=0", "--training.steps=60")
    assert (code, "training.steps=60" in message) == (2, True)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "run.yaml", "{long}"],
        ["new", "{long}.yaml", "--model", "gpt2_mini", "--devices", "0", "--data", "text.jsonl"],
        ["prepare", "{long}.yaml"],
        ["train", "run.yaml", "run.output_dir={long}/a"],
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have_is_refused_by_every_command(trained: Path, arguments: list[str]) -> None:
    assert "nnnn" in refuse(*(argument.format(long="n" * 300) for argument in arguments))
    assert not (trained / "exported").exists()


def test_a_rank_with_a_wrong_environment_names_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "abc")
    code, message = work()
    assert (code, "RANK='abc': expected a whole number of 0 or more" in message) == (2, True)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("command", [["train", "run.yaml"], ["doctor"]])
def test_a_device_that_does_not_exist_is_named_by_the_command(
    command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(folder)
    monkeypatch.setenv("DS_ACCELERATOR", "foo")
    assert "DS_ACCELERATOR='foo': expected cpu or cuda" in refuse(*command)


def test_data_that_is_not_prepared_or_only_in_part_is_refused(folder: Path) -> None:
    for command in (["evaluate", "run.yaml"], ["study", "packing", "run.yaml"], ["export", "run.yaml", "x"]):
        assert "has not been prepared" in refuse(*command)
    prepare(folder)
    (folder / "out" / "data" / "manifest.json").unlink()
    assert "or only in part" in refuse("train", "run.yaml")
    assert not (folder / "x").exists()


def work(*overrides: str) -> tuple[int, str]:
    """Runs one rank in the current folder; returns its exit code and the error that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "evenpack.launcher.worker", "run.yaml", "training.loader_workers=0", *overrides],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.partition("error: ")[2]


@pytest.mark.slow
def test_a_checkpoint_of_other_data_or_another_seed_is_not_gone_on_with(trained: Path) -> None:
    code, message = work("run.seed=7")
    assert code == 2
    assert "choose another run.output_dir to start again" in message.replace("\n", " ")
    assert [path.name for path in (trained / "out" / "checkpoints").glob("step*")] == ["step_000002"]


def test_a_model_of_another_shape_is_not_evaluated(trained: Path) -> None:
    assert "is of another model than the run file's" in refuse("evaluate", "run.yaml", "model.layers=3")


def test_weights_of_equal_shapes_but_another_model_are_not_evaluated_or_exported(trained: Path) -> None:
    expected = "is of a model with heads 2, this run has model.heads 1"
    assert expected in refuse("evaluate", "run.yaml", "model.heads=1")
    assert expected in refuse("export", "run.yaml", "exported", "model.heads=1")
    assert not (trained / "exported").exists()


def test_a_trained_model_is_loaded_without_the_cost_model_of_its_run(trained: Path) -> None:
    config = load_run_file(trained / "run.yaml", RunConfig, ["training.cost_model=gone.json"])
    assert load_trained_model(config, torch.device("cpu")).checkpoint.step == 2
