"""The whole first day on a GPU, with tiny models on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
def test_every_step_of_the_day_runs_and_its_values_are_gathered(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--no-install", "--minutes", "120"]
    command = [sys.executable, str(ROOT / "scripts/gpu_day"), *words]
    places = ["--directory", str(tmp_path / "day"), "--results", str(tmp_path / "cpu")]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    value = json.loads((tmp_path / "cpu.json").read_text())
    assert {one["status"] for one in value["steps"].values()} == {"done"}
    page = (tmp_path / "cpu.md").read_text()
    assert "Not measured." not in page
    assert len(list(tmp_path.glob("cpu_*.png"))) == 4
    for run in ("bert_large_phase2", "gpt2_small", "gpt2_xl", "llama_160m"):
        assert f"cost_model_{run}" in value["results"]
        assert f"| {run}_auto | " in page
