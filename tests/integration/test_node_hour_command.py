"""The hour on a node, with tiny models on two CPU ranks: every step is done and leaves its values."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
def test_the_hour_writes_one_result_with_the_values_of_every_step(tmp_path: Path) -> None:
    places = ["--directory", str(tmp_path / "results"), "--scratch", str(tmp_path / "scratch")]
    command = [sys.executable, str(ROOT / "scripts/node_hour"), "--tiny", "--gpus", "2", *places]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").glob("*.json")
    assert {one.name for one in path.parent.iterdir()} == {f"{path.stem}.{ending}" for ending in ("json", "md", "txt")}
    value = json.loads(path.read_text())
    assert {one["status"] for one in value["steps"].values()} == {"done"}
    results = value["results"]
    assert set(results) == {name.replace(" ", "_") for name in value["steps"]} - {"corpora"}
    assert all(row["is_right"] for row in results["collectives"]["rows"])
    assert all(row["passed_on"] == 2 for row in results["isolation"]["rows"])
    whole, *resumed = results["resuming"]["runs"]
    for run in resumed:
        assert run["is_planned_order"]
        assert run["losses"] == pytest.approx(whole["losses"], rel=1e-5)
