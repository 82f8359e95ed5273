"""The hour on a node, with tiny models on two CPU ranks: its files, and every key of its result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_day_values import PART, STEP, check_throughput
from repository import ROOT

BERT, XL = "bert_large_phase2_sprint", "gpt2_xl"
COLLECTIVES = ["all-reduce", "reduce-scatter", "all-gather"]
SCHEMES = {"packed cost_balanced", "packed arrival", "unpadded cost_balanced", "unpadded arrival", "padded arrival"}


def check_collectives(value: dict[str, Any]) -> None:
    assert list(value) == ["device", "ranks", "backend", "repeats", "rows"]
    assert (value["ranks"], value["backend"]) == (2, "gloo")
    assert [row["collective"] for row in value["rows"]] == 2 * COLLECTIVES
    for row in value["rows"]:
        names = ["collective", "bytes", "seconds", "algorithm_bytes_per_second", "bus_bytes_per_second", "is_right"]
        assert list(row) == names
        assert row["is_right"] is True
        assert row["algorithm_bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        share = 1.0 if row["collective"] == "all-reduce" else 0.5  # 2 (n - 1) / n and (n - 1) / n of two ranks
        assert row["bus_bytes_per_second"] == pytest.approx(share * row["algorithm_bytes_per_second"])


def check_isolation(value: dict[str, Any]) -> None:
    assert list(value) == ["device", "ranks", "rows"]
    assert {row["backend"] for row in value["rows"]} >= {"reference", "sdpa"}
    for row in value["rows"]:
        names = ["backend", "request", "max_deviation", "control_deviation", "tolerance", "passed_on", "errors"]
        assert list(row) == names
        assert 0.0 <= row["max_deviation"] <= row["tolerance"] < 0.1 * row["control_deviation"]
        assert (row["passed_on"], row["errors"]) == (value["ranks"], [])
    assert value["ranks"] == 2


def check_resuming(value: dict[str, Any]) -> None:
    names = ["ranks", "steps", "zero_stage", "precision", "tolerance", "planned_order", "runs"]
    assert list(value) == names
    assert (value["ranks"], value["steps"], value["zero_stage"], value["precision"]) == (2, 12, 1, "fp32")
    assert len(set(value["planned_order"])) == 12
    assert [run["starts"] for run in value["runs"]] == [[2], [2, 1, 2], [1]]
    whole = value["runs"][0]
    for run in value["runs"]:
        names = ["starts", "seconds", "world_sizes", "losses", "order", "is_planned_order", "largest_difference"]
        assert list(run) == names
        assert run["seconds"] > 0
        assert run["world_sizes"] == [ranks for ranks in run["starts"] for _ in range(12 // len(run["starts"]))]
        assert run["order"] == value["planned_order"]
        assert run["is_planned_order"] is True
        assert run["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert 0.0 <= run["largest_difference"] < 1e-5 < value["tolerance"]
    assert len(set(whole["losses"])) == 12


def check_waits(value: dict[str, Any]) -> None:
    assert list(value) == ["measured_on", "batch", "packs", "rows"]
    assert (value["batch"], value["packs"], value["measured_on"]["family"]) == (4, 2, "bert")
    assert {row["scheme"] for row in value["rows"]} == SCHEMES
    for row in value["rows"]:
        of_ranks = ["trained_slowest_over_mean", "standard_error", "replayed_slowest_over_mean", "difference"]
        assert list(row) == ["scheme", "ranks", "steps", *of_ranks, "trained_wait_share", "replayed_wait_share"]
        assert (row["ranks"], row["steps"]) == (2, 2)
        trained, replayed = row["trained_slowest_over_mean"], row["replayed_slowest_over_mean"]
        assert min(trained, replayed) >= 1.0
        assert row["difference"] == pytest.approx(replayed / trained - 1.0)
        assert row["standard_error"] >= 0.0
        assert 0.0 <= row["trained_wait_share"] < 0.5  # of two ranks
        assert 0.0 <= row["replayed_wait_share"] < 0.5


@pytest.mark.slow
def test_the_hour_writes_one_result_with_every_value(tmp_path: Path) -> None:
    places = ["--directory", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    command = [sys.executable, str(ROOT / "scripts/node_hour"), "--tiny", "--gpus", "2", *places]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").glob("*.json")
    assert path.stem.startswith("cpux2_20")
    assert {one.name for one in path.parent.iterdir()} == {f"{path.stem}.{ending}" for ending in ("json", "md", "txt")}
    value = json.loads(path.read_text())
    assert set(value) == PART - {"part"} | {"ranks"}
    assert (value["ranks"], value["device"], value["gpus"], value["gpu_memory_bytes"]) == (2, "CPU", 0, None)
    assert value["command"].startswith("scripts/node_hour --tiny --gpus 2")
    names = [f"throughput {run} on {ranks}" for ranks in (2, 1) for run in (BERT, XL)]
    assert list(value["steps"]) == ["corpora", "collectives", "isolation", "resuming", *names, "waits"]
    for one in value["steps"].values():
        assert set(one) == STEP
        assert (one["status"], one["exit_code"]) == ("done", 0)
        assert one["seconds"] > 0
    results = value["results"]
    assert set(results) == {name.replace(" ", "_") for name in value["steps"]} - {"corpora"}
    check_collectives(results["collectives"])
    check_isolation(results["isolation"])
    check_resuming(results["resuming"])
    check_waits(results["waits"])
    for run in (BERT, XL):
        for ranks in (2, 1):
            study = results[f"throughput_{run}_on_{ranks}"]
            check_throughput(study, ["packed", "unpadded", "padded"], has_cost_model=False)
            assert (study["ranks"], study["rows_per_step"], study["rows_per_micro_batch"]) == (ranks, 2 * ranks, 1)
            for row in study["layouts"]:
                assert 0.0 <= row["wait_share"] < 1.0
                assert (row["wait_share"] == 0.0) == (ranks == 1)
    page = path.with_suffix(".md").read_text()
    for name in value["steps"]:
        assert f"| {name} | done |" in page
    assert "| 2 -> 1 -> 2 | 12 |" in page
    assert "| packed cost_balanced | 2 |" in page
