"""The commands one after another, as a user types them, each in a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import STEPS, evenpack, write_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run."""
    path = write_run(tmp_path_factory.mktemp("commands"))
    evenpack("prepare", path)
    return path


@pytest.fixture(scope="module")
def trained(run_file: Path) -> dict[str, Any]:
    """What `evenpack train --json` says of the run on two ranks."""
    done = evenpack("train", run_file, options=["--cpu-ranks", "2", "--json"])
    assert f"step {STEPS}/{STEPS}" in done.stderr
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_train_ends_with_the_numbers_of_the_run_and_a_plot(run_file: Path, trained: dict[str, Any]) -> None:
    report = trained["report"]
    assert (trained["state"], report["step"]) == ("finished", STEPS)
    assert 0.9 < report["packing_efficiency"] <= 1
    assert report["packing_factor"] > 1
    assert report["last_loss"] < report["first_loss"]
    assert set(report["validation_loss"]) == {"one", "two"}
    assert Path(trained["loss_plot"]).read_bytes().startswith(b"\x89PNG")
    output = run_file.parent / "out"
    assert not (output / ".stop").exists()
    assert [json.loads(path.read_text())["state"] for path in (output / "ranks").glob("rank_*.json")] == [
        "finished"
    ] * 2


def test_a_run_that_is_done_is_shown_again_as_a_table(run_file: Path, trained: dict[str, Any]) -> None:
    done = evenpack("train", run_file, options=["--cpu-ranks", "1"])
    assert "nothing to do" in done.stderr
    for words in ("packing efficiency", "packing factor", "padding share", "tokens/s", "validation loss, two"):
        assert words in done.stdout
    assert f"{trained['report']['last_loss']:.4f}" in done.stdout


def test_evaluate_finds_the_losses_that_training_has_seen(run_file: Path, trained: dict[str, Any]) -> None:
    values = json.loads(evenpack("evaluate", run_file, options=["--json"]).stdout)
    assert values["step"] == STEPS
    for source, loss in trained["report"]["validation_loss"].items():
        assert values["sources"][source]["loss"] == pytest.approx(loss, rel=1e-5)


def test_transformers_loads_what_export_writes(run_file: Path, trained: dict[str, Any]) -> None:
    from transformers import AutoTokenizer, GPT2LMHeadModel

    directory = run_file.parent / "exported"
    done = evenpack("export", run_file, str(directory), options=["--json"])
    assert json.loads(done.stdout) == {"directory": str(directory), "step": STEPS, "tokenizer": True}
    model = GPT2LMHeadModel.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.n_layer == 2
