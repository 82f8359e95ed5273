"""`study chunking` as a user types it: real runs of a few steps, one of which fails."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import CONFIGS
from run_files import write_run_file
from slow_cases import slow_but
from small_run import evenpack, metrics, small_run_values
from this_process import ThisProcess

from evenpack.console import save_json
from evenpack.studies.chunking.command import ChunkingCommand

GRID = {
    "lengths": [{"max_sequence_length": 32, "rows_per_step": 64, "atoms": [32]}],
    "recipes": {"padding": {"data.recipe": {"kind": "padding", "isolate_documents": False}}},
    "recipes_without_atoms": {
        "best_fit": {"data.recipe": {"kind": "documents"}, "attention.isolate": False},
        "documents": {"data.recipe": {"kind": "documents"}},
    },
}
LOST = {"data.recipe.max_sequence_length": 32, "data.pack_length": 32, "training.initialize_from": "/nowhere/weights"}


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunking")
    values = small_run_values(folder)
    del values["data"]["prepared_dir"]
    values["model"] |= {"positions": "alibi"}
    values["training"] |= {"steps": None, "epochs": 1, "evaluate_every_steps": 100, "checkpoint_every_steps": None}
    values["training"] |= {"packs_per_micro_batch": 32, "packs_per_step": 64, "evaluation_packs": None}
    write_run_file(folder / "run.yaml", values)
    study = {
        "study": {"name": "tiny", "output_dir": str(folder / "study")},
        "phases": {"training": {"base": "run.yaml", "seeds": [1], "arms": {"lost": LOST}}},
        "chunking": {"grid": GRID, "reference": "documents_{msl}"},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of the study as JSON values, and the commands that it started."""

    value: dict[str, Any]
    commands: list[str]
    figures: list[str]


@pytest.fixture(scope="module")
def found(study_file: Path) -> Found:
    return study(study_file, plot=study_file.parent / "figures")


def study(study_file: Path, *, plot: Path | None = None) -> Found:
    machine = ThisProcess()
    report = ChunkingCommand(plot=plot).run(study_file, (), machine)
    assert report.unmet == "1 of 5 runs failed; their errors are above"
    saved = study_file.parent / "found.json"
    save_json(report.value, saved)
    figures = [] if plot is None else [path.name for path in plot.iterdir()]
    return Found(value=json.loads(saved.read_text()), commands=machine.commands, figures=figures)


@pytest.mark.slow
def test_a_study_trains_evaluates_compares_and_shows_what_failed(study_file: Path, found: Found) -> None:
    assert found.commands == ["prepare"] * 2 + ["train", "evaluate", "train", "train", "train"]
    assert found.figures == ["msl_32.png"]
    states = {run["run"]: run["state"] for run in found.value["runs"]}
    assert states.pop("training/lost/seed_1") == "failed"
    assert set(states.values()) == {"finished"}
    rows = {row["arm"]["name"]: row for row in found.value["arms"]}
    for name, row in rows.items():
        records = metrics(study_file.parent / f"study/training/{name}/seed_1")
        assert row["steps"] == len(records) > 2
        assert row["final_step"]["mean"] == pytest.approx(math.exp(records[-1]["loss"]), rel=1e-6)
        own = records[-1]["validation"].values()
        losses, targets = ([values[key] for values in own] for key in ("loss", "targets"))
        mean = sum(loss * count for loss, count in zip(losses, targets, strict=True)) / sum(targets)
        if row["arm"]["isolates"]:
            assert row["own_rows"]["mean"] == pytest.approx(math.exp(mean), rel=1e-6)
        if row["arm"]["kind"] == "documents":
            assert row["documents"]["mean"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert rows["best_fit_32"]["own_rows"] is None
    assert rows["documents_32"]["own_rows"] is not None
    padding = rows["padding_32_atom_32"]
    assert padding["padding_share"] > rows["documents_32"]["padding_share"] + 0.05


@pytest.mark.slow
def test_all_arms_are_evaluated_on_the_same_targets(study_file: Path, found: Found) -> None:
    """Runs on documents evaluate them themselves."""
    (path,) = study_file.parent.rglob("documents/evaluation.json")
    results = [json.loads(path.read_text())["sources"]]
    for arm in ("best_fit_32", "documents_32"):
        results.append(metrics(study_file.parent / f"study/training/{arm}/seed_1")[-1]["validation"])
    counts = [{name: values["targets"] for name, values in sources.items()} for sources in results]
    assert counts[0] == counts[1] == counts[2]
    assert all(counts[0].values())


@pytest.mark.slow
def test_a_restart_repeats_only_what_failed_and_reports_the_rest_from_disk(study_file: Path, found: Found) -> None:
    assert study(study_file).commands == ["train"]
    logs = list((study_file.parent / "study").rglob("metrics.jsonl"))
    for log in logs:
        log.rename(log.with_suffix(".away"))
    try:
        done = evenpack("study chunking", study_file, options=["--only-report", "--json"], expected=2)
    finally:
        for log in logs:
            log.with_suffix(".away").rename(log)
    assert json.loads(done.stdout)["arms"] == found.value["arms"]


@pytest.mark.slow
def test_a_dry_run_lists_the_runs_with_their_steps(study_file: Path, found: Found) -> None:
    listed = json.loads(
        evenpack("study chunking", study_file, options=["--dry-run", "--json", "--devices-per-run", "1"]).stdout
    )
    steps = {row["arm"]["name"]: row["steps"] for row in found.value["arms"]}
    assert {run["run"]: run["steps"] for run in listed["runs"] if run["state"] == "finished"} == {
        f"training/{name}/seed_1": count for name, count in steps.items()
    }


SHIPPED = {"atom_size_gpt2_124m": 28, "atom_size_gpt2_xl": 30, "atom_size_mini": 87}
"""Runs of each; table 4 of the paper has the first two numbers."""


@pytest.mark.parametrize("name", slow_but(["atom_size_gpt2_124m"], SHIPPED))
def test_a_shipped_grid_lists_its_runs(name: str, tmp_path: Path) -> None:
    path, overrides = CONFIGS / "studies" / f"{name}.yaml", [f"study.output_dir={tmp_path / 'out'}"]
    done = evenpack("study chunking", path, *overrides, options=["--dry-run", "--json", "--devices-per-run", "1"])
    runs = json.loads(done.stdout)["runs"]
    assert len({run["run"] for run in runs}) == len(runs) == SHIPPED[name]
    assert {run["state"] for run in runs} == {"to do"}
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_data_of_another_tokenizer_are_not_evaluated(study_file: Path, found: Found) -> None:
    run_file = study_file.parent / "run.yaml"
    trained = f"run.output_dir={study_file.parent}/study/training/documents_32/seed_1"
    other = [trained, f"data.prepared_dir={study_file.parent}/other", "data.tokenizer.vocabulary_size=300"]
    evenpack("prepare", run_file, *other)
    done = evenpack("evaluate", run_file, *other, expected=2)
    assert "was trained with another tokenizer" in done.stderr
    assert re.search(r"its vocabulary_size is \d+, here it is 300\.", done.stderr)
