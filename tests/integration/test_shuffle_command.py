"""`study shuffle`: its arms are prepared, trained, measured and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prepared_files import sentences, write_jsonl
from small_run import evenpack
from this_process import ThisProcess

from evenpack.console import save_json
from evenpack.errors import ConfigError, DataError
from evenpack.studies.shuffle.command import ShuffleCommand
from evenpack.studies.shuffle.study import KEPT
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
        "shuffle": {
            "reference": "permutation",
            "buffer": 20,
            "steps_around_border": 1,
            "steps_read": 3,
            "held_out": {"sentences": str(folder / "held_out.jsonl"), "numbers": None},
        },
    }
    write_jsonl(folder / "held_out.jsonl", sentences(12, seed=9))
    write_jsonl(folder / "numbers.jsonl", ["".join(f"{n + k} " for k in range(40)) for n in range(70, 75)])
    for key in ("rows", "columns"):
        del study["phases"]["training"]["arms"]["blocks"]["data.shuffle"][key]
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.slow
def test_arms_are_trained_measured_and_drawn(study_file: Path, tmp_path: Path) -> None:
    plot, saved, machine = tmp_path / "figure.png", tmp_path / "found.json", ThisProcess()
    numbers = f"shuffle.held_out.numbers={study_file.parent / 'numbers.jsonl'}"
    report = ShuffleCommand(plot=plot).run(study_file, (numbers,), machine)
    assert (report.unmet, machine.commands.count("train"), machine.commands.count("evaluate")) == (None, 3, 6)
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
    held_out = {(row["kind"], row["arm"]): row["losses"]["1"] for row in found["held_out"]}
    assert list(held_out) == [
        (k, a) for k in ("sentences", "numbers", "mean") for a in ("permutation", "grid", "blocks")
    ]
    assert held_out["mean", "grid"] == pytest.approx((held_out["sentences", "grid"] + held_out["numbers", "grid"]) / 2)
    evaluated = study_file.parent / "study/training/grid/seed_1/held_out/numbers/evaluation.json"
    assert held_out["numbers", "grid"] == json.loads(evaluated.read_text())["sources"]["numbers"]["loss"]
    assert_is_reported_again(study_file, numbers, found, tmp_path)


def assert_is_reported_again(study_file: Path, numbers: str, found: dict[str, Any], folder: Path) -> None:
    """Without logs and prepared data; not on other text, and not without what is kept of a run."""
    runs = study_file.parent / "study"
    for path in [*runs.rglob("metrics.jsonl"), *runs.glob("data/*/manifest.json")]:
        path.unlink()
    again = folder / "again.json"
    save_json(ShuffleCommand(only_report=True).run(study_file, (numbers,), ThisProcess()).value, again)
    for key in ("orders", "borders", "jumps", "held_out", "losses"):
        assert json.loads(again.read_text())[key] == found[key], key
    with pytest.raises(DataError, match="and the study now names other: undo that change"):
        ShuffleCommand(only_report=True).run(study_file, ("shuffle.held_out.numbers=other",), ThisProcess())
    kept = runs / "training/grid/seed_1" / KEPT
    for content in (kept.read_text().replace('"losses": [\n    ', '"losses": [\n    1'), '{"orders": []}'):
        kept.write_text(content)
        with pytest.raises(DataError, match=f"{KEPT} is damaged or of another version"):
            ShuffleCommand(only_report=True).run(study_file, (numbers,), ThisProcess())
    kept.unlink()
    with pytest.raises(DataError, match=f"neither .*{KEPT} nor .* exists"):
        ShuffleCommand(only_report=True).run(study_file, (numbers,), ThisProcess())


def test_held_out_text_without_a_file_is_refused_before_anything_is_trained(study_file: Path, tmp_path: Path) -> None:
    absent, no_pattern = (f"={tmp_path / name}" for name in ("absent.jsonl", "a**b.jsonl"))
    for word, found in (("", "names no text"), (absent, "there is no file"), (no_pattern, "there is no file")):
        machine = ThisProcess()
        overrides = [f"study.output_dir={tmp_path}", *([f"shuffle.held_out.numbers{word}"] if word else [])]
        with pytest.raises(ConfigError, match=found):
            ShuffleCommand().run(study_file, overrides, machine)
        assert machine.commands == []


def test_an_unknown_reference_and_a_second_source_are_refused(study_file: Path) -> None:
    wrong = evenpack("study shuffle", study_file, "shuffle.reference=uniform", options=["--dry-run"], expected=2)
    assert "expected an arm of the last phase, training (permutation, grid, blocks), found 'uniform'" in wrong.stderr
    two = {"both": {"kind": "jsonl", "path": "a"}, "other": {"kind": "jsonl", "path": "b"}}
    second = f"data.sources={json.dumps(two)}"
    wrong = evenpack("study shuffle", study_file, second, options=["--dry-run"], expected=2)
    assert "measures the order of one source, found both, other" in wrong.stderr
