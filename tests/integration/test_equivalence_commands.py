"""`study equivalence` with real runs of three steps, one of which fails, and their fine-tuning."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from finetuning_tasks import write_finetune_file, write_sentences
from pair_sources import pair_run_values
from repository import CONFIGS
from run_files import write_run_file
from slow_cases import slow_but
from small_run import evenpack

from evenpack.launcher import studying

ARMS = {"unpacked": {"training.layout": "padded"}, "lost": {"training.initialize_from": "/nowhere/weights"}}


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two arms over a run file beside it, with prepared data, and a task for fine-tuning."""
    folder = tmp_path_factory.mktemp("study")
    values = pair_run_values(
        folder,
        data={"validation_fraction": 0.02},
        training={"steps": 3, "evaluate_every_steps": 2, "evaluation_packs": 4, "checkpoint_every_steps": 3},
    )
    run_file = write_run_file(folder / "run.yaml", values)
    evenpack("prepare", run_file)
    write_sentences(folder / "SST-2", training=24, evaluation=12)
    tuning = {
        "run": {"name": "sst2", "output_dir": "elsewhere"},
        "data": {"task": "sst2", "max_sequence_length": 48},
        "training": {"sequences_per_step": 8, "epochs": 1},
    }
    write_finetune_file(folder / "tuning.yaml", tuning)
    study = {
        "study": {"name": "tiny", "output_dir": str(folder / "study")},
        "phases": {"training": {"base": "run.yaml", "seeds": [1], "arms": ARMS}},
        "equivalence": {"reference": "unpacked", "margin": 0.1},
        "finetune": {"feeling": {"base": "tuning.yaml", "folder": str(folder / "SST-2"), "seeds": [0, 1]}},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


@pytest.mark.slow
def test_a_study_trains_compares_and_shows_what_failed(study_file: Path, tmp_path: Path) -> None:
    plot, saved = tmp_path / "figure.png", tmp_path / "found.json"
    options = ["--devices-per-run", "1", "--plot", str(plot), "--save", str(saved)]
    done = evenpack("study equivalence", study_file, options=options, expected=2, DS_ACCELERATOR="cpu")
    assert "starting training/unpacked/seed_1" in done.stderr
    assert "starting training/unpacked/seed_1/finetune/feeling" in done.stderr
    assert "2 of 4 runs failed" in done.stderr
    assert "Failed:\n  training/lost/seed_1: training.initialize_from: expected a run's output_dir" in done.stdout
    assert "/nowhere/weights does not exist" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    value = json.loads(saved.read_text())
    assert [run["state"] for run in value["runs"]] == ["finished", "failed"] * 2
    assert value["runs"][3]["message"] == "run training/lost/seed_1, with whose weights it begins, has failed"
    assert_tuned(study_file, value, done.stdout)
    (row,) = value["comparison"]["rows"]
    assert (row["arm"], row["seeds"], row["difference"]) == ("unpacked", [1], None)
    curve = value["curves"]["unpacked"]["1"]
    records = read_log(study_file.parent / "study/training/unpacked/seed_1")
    sequences = [record["sequences"] for record in records]
    assert curve["samples"] == [sum(sequences[:2]), sum(sequences)]
    assert all(record["host_to_device_bytes"] > 8 * record["slots"] for record in records)
    assert_nothing_is_trained_again(study_file, records)


def assert_tuned(study_file: Path, value: dict[str, Any], shown: str) -> None:
    """The report's figures are those that `evenpack finetune` has written."""
    folder = study_file.parent / "study/training/unpacked/seed_1/finetune/feeling"
    summary = json.loads((folder / "results.json").read_text())
    assert summary["settings"]["weights"].endswith("of run 'tiny/training/unpacked/seed_1'")
    (task,) = value["finetuned"]
    (arm,) = task["arms"]
    tuned = arm["runs"]["1"]
    assert (task["task"], task["title"], arm["arm"]) == ("feeling", "SST-2", "unpacked")
    assert tuned["values"] == {str(one["seed"]): one["metrics"]["dev"]["accuracy"] for one in summary["seeds"]}
    assert tuned["median"] == arm["median"] == summary["medians"]["dev"]["accuracy"]
    assert f"{tuned['interval'][0]:.4f} to {tuned['interval'][1]:.4f}" in shown


def assert_nothing_is_trained_again(study_file: Path, records: list[dict[str, Any]]) -> None:
    """A finished run is not changed, and the report needs no run."""
    done = evenpack("study equivalence", study_file, options=["--only-report", "--json"], expected=2)
    assert json.loads(done.stdout)["runs"][1]["state"] == "failed"
    listed = evenpack("study equivalence", study_file, options=["--dry-run", "--json"]).stdout
    assert [run["state"] for run in json.loads(listed)["runs"]] == ["finished", "failed"]
    assert [run["state"] for run in json.loads(listed)["finetunings"]] == ["finished", "failed"]
    assert read_log(study_file.parent / "study/training/unpacked/seed_1") == records


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["phases.training.arms.lost={training.layot: padded}"], "did you mean 'layout'"),
        (["finetune.feeling.folder=/nowhere"], "/nowhere has no train.tsv, a file of SST-2: give finetune.feeling"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_is_written(
    study_file: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    output_dir = tmp_path / "other"
    done = evenpack("study equivalence", study_file, f"study.output_dir={output_dir}", *overrides, expected=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not output_dir.exists()


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_ranks_that_cannot_divide_a_step_are_told_the_option_before_anything_is_trained(
    study_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(studying, "cpu_cores", lambda: 2)
    words = [f"study.output_dir={tmp_path / 'other'}", "training.packs_per_step=7", "training.packs_per_micro_batch=1"]
    done = evenpack("study equivalence", study_file, *words, options=options, expected=2, DS_ACCELERATOR="cpu")
    assert "--devices-per-run" in done.stderr
    assert not list(tmp_path.glob("other/**/metrics.jsonl"))
    evenpack("study equivalence", study_file, *words, options=["--dry-run", "--devices-per-run", "1"])


SHIPPED = [path for path in sorted((CONFIGS / "studies").glob("*.yaml")) if "equivalence:" in path.read_text()]


@pytest.mark.parametrize("path", slow_but(SHIPPED[:2], SHIPPED), ids=lambda path: path.stem)
def test_a_shipped_study_lists_its_runs(path: Path, tmp_path: Path) -> None:
    overrides = [f"study.output_dir={tmp_path / 'out'}"]
    done = evenpack("study equivalence", path, *overrides, options=["--dry-run", "--json", "--devices-per-run", "1"])
    value = json.loads(done.stdout)
    expected = sum(len(phase["seeds"]) * len(phase["arms"]) for phase in value["study"]["phases"].values())
    assert len(value["runs"]) == expected >= 4
    assert {run["state"] for run in value["runs"]} == {"to do"}
    assert not (tmp_path / "out").exists()
