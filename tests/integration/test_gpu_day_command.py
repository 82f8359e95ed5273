"""Each part of the GPU day, with tiny models on the CPU: its files, and every key of its results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_day_values import (
    COST_MODEL,
    PART,
    STEP,
    STUDY,
    check_checks,
    check_design,
    check_law,
    check_overhead,
    check_profile,
    check_replay,
    check_throughput,
)
from repository import ROOT

BERT, SMALL, XL = "bert_large_phase2_sprint", "gpt2_small", "gpt2_xl"


def results_of(part: str, folder: Path, *, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs a part and returns its results; its files are three and the `others`."""
    places = ["--directory", str(folder / "results"), "--scratch", str(folder / "scratch")]
    command = [sys.executable, str(ROOT / "scripts/gpu_day"), part, "--tiny", "--no-install", *places]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (folder / "results").glob("*.md")
    assert page.stem.startswith("cpu_20")
    assert page.stem.endswith(f"_{part}")
    names = {f"{page.stem}{ending}" for ending in (".json", ".md", ".txt", *(f"_{one}" for one in others))}
    assert {path.name for path in (folder / "results").iterdir()} == names
    value = json.loads(page.with_suffix(".json").read_text())
    assert set(value) == PART
    assert (value["part"], value["device"], value["gpu_memory_bytes"]) == (part, "CPU", None)
    for one in value["steps"].values():
        assert set(one) == STEP
        assert (one["status"], one["exit_code"]) == ("done", 0)
    text = page.read_text()
    for name in value["steps"]:
        assert f"| {name} | done |" in text
    results: dict[str, Any] = value["results"]
    return results


@pytest.mark.slow
def test_the_headlines_and_the_gpu_tests(tmp_path: Path) -> None:
    results = results_of("A", tmp_path)
    names = [f"throughput_{run}_compiled" for run in (SMALL, BERT, XL)]
    names.append(f"throughput_{BERT}_compiled_without_attention_dropout")
    resumed = results.pop("resuming")["runs"]
    assert [run["starts"] for run in resumed] == [[1], [1, 1]]
    assert all(run["is_planned_order"] and run["largest_difference"] == 0.0 for run in resumed)
    assert sorted(results) == sorted(names)
    for value in results.values():
        check_throughput(value, ["packed"], has_cost_model=False)
    assert "tests/gpu/test_bert_gpu.py::" in next((tmp_path / "results").glob("*.txt")).read_text()


@pytest.mark.slow
def test_the_replay(tmp_path: Path) -> None:
    results = results_of("R", tmp_path)
    assert list(results) == ["replay"]
    assert set(results["replay"]) == STUDY
    check_replay(results["replay"]["replay"], ranks=[1, 2])
    (page,) = (tmp_path / "results").glob("*.md")
    assert "| packed cost_balanced | 2 |" in page.read_text()


@pytest.mark.slow
def test_what_decides_the_design(tmp_path: Path) -> None:
    results = results_of("B", tmp_path)
    profiles = [f"profile_{run}" for run in (SMALL, BERT, XL)]
    assert sorted(results) == sorted(["design", f"checks_{SMALL}", f"checks_{BERT}", *profiles])
    check_design(results["design"], on_gpu=False)
    for run in (SMALL, BERT):
        check_checks(results[f"checks_{run}"], steps=2, on_gpu=False)
    for name in profiles:
        check_profile(results[name], steps=1)


@pytest.mark.slow
def test_the_curves(tmp_path: Path) -> None:
    results = results_of("C", tmp_path, others=(f"cost_model_{BERT}.json", f"cost_model_{SMALL}.json"))
    layouts = {f"throughput_{run}_layouts" for run in (BERT, SMALL)}
    assert set(results) == {*layouts, "packing_overhead", f"throughput_{SMALL}_eager", "law_of_one_device"}
    for name in layouts:
        check_throughput(results[name], ["padded", "unpadded", "packed"], has_cost_model=True)
    check_throughput(results[f"throughput_{SMALL}_eager"], ["packed"], has_cost_model=False)
    check_overhead(results["packing_overhead"])
    check_law(results["law_of_one_device"], steps=4)
    for path in (tmp_path / "results").glob("*cost_model*"):
        assert set(json.loads(path.read_text())) == COST_MODEL
