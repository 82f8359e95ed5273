"""`study shuffle`: its arms are prepared, trained, measured and drawn."""

import json
from pathlib import Path

import pytest
import yaml
from prepared_files import sentences, write_jsonl
from small_run import evenpack
from this_process import ThisProcess

from evenpack.console import save_json
from evenpack.studies.shuffle.command import ShuffleCommand
from evenpack.testing import run_values, write_run_file

GRID = {"kind": "grid", "rows": 2, "columns": 3, "block_tokens": 600}


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shuffle")
    corpus = folder / "corpus"
    corpus.mkdir()
    write_jsonl(corpus / "1.jsonl", sentences(60, seed=1))
    write_jsonl(corpus / "2.jsonl", ["".join(f"{n + k} " for k in range(30)) for n in range(60)])
    data = {
        "prepared_dir": None,
        "sources": {"both": {"kind": "jsonl", "path": str(corpus)}},
        "recipe": {"kind": "documents", "max_sequence_length": 64},
        "pack_length": 64,
    }
    training = {"steps": 8, "evaluate_every_steps": 8, "evaluation_packs": 2, "checkpoint_every_steps": 8}
    write_run_file(folder / "run.yaml", run_values("gpt2", folder, data=data, training=training))
    study = {
        "study": {"name": "tiny", "output_dir": str(folder / "study")},
        "phases": {
            "training": {
                "base": "run.yaml",
                "seeds": [1],
                "arms": {
                    "permutation": {},
                    "grid": {"data.shuffle": GRID},
                    "blocks": {"data.shuffle": {**GRID, "kind": "blocks"}},
                },
            }
        },
        "shuffle": {"reference": "permutation", "buffer": 20, "steps_around_border": 1, "steps_read": 3},
    }
    for key in ("rows", "columns"):
        del study["phases"]["training"]["arms"]["blocks"]["data.shuffle"][key]
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


def test_arms_are_trained_measured_and_drawn(study_file: Path, tmp_path: Path) -> None:
    plot, saved, machine = tmp_path / "figure.png", tmp_path / "found.json", ThisProcess()
    report = ShuffleCommand(plot=plot).run(study_file, (), machine)
    assert (report.unmet, machine.commands.count("train")) == (None, 3)
    save_json(report.value, saved)
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(saved.read_text())
    orders = {one["arm"]: one for one in found["orders"]}
    assert list(orders) == ["permutation", "grid", "blocks", "rolling buffer", "no shuffle"]
    displacement = {arm: one["quality"]["displacement"] for arm, one in orders.items()}
    assert displacement["no shuffle"] < displacement["blocks"] < displacement["grid"]
    assert orders["no shuffle"]["quality"]["window_distance"] > 3 * orders["grid"]["quality"]["window_distance"]
    assert orders["grid"]["reading"]["bytes_used"] > 0
    assert orders["rolling buffer"]["reading"] is None
    assert len(found["losses"]["grid"]["1"]) == 8
    assert found["borders"] == orders["blocks"]["borders"]
    assert set(found["jumps"]) == {"permutation", "grid", "blocks"}


def test_an_unknown_reference_and_a_second_source_are_refused(study_file: Path) -> None:
    wrong = evenpack("study shuffle", study_file, "shuffle.reference=uniform", options=["--dry-run"], expected=2)
    assert "expected an arm of the last phase, training (permutation, grid, blocks), found 'uniform'" in wrong.stderr
    two = {"both": {"kind": "jsonl", "path": "a"}, "other": {"kind": "jsonl", "path": "b"}}
    second = f"data.sources={json.dumps(two)}"
    wrong = evenpack("study shuffle", study_file, second, options=["--dry-run"], expected=2)
    assert "measures the order of one source, found both, other" in wrong.stderr
