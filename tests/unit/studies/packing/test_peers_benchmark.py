"""The benchmark of packers by others, as a command, which checks every packing."""

import json
import os
import subprocess
import sys

import pytest
from repository import ROOT


@pytest.mark.slow
def test_the_command_measures_evenpack_with_and_without_a_limit_of_depth() -> None:
    options = ["--json", "--sequences", "2e3", "--repeats", "1", "--only"]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/peers/packing.py"), *options, "evenpack longest"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    free, limited = json.loads(finished.stdout)["rows"]
    assert [free["status"], limited["status"]] == ["checked", "checked"]
    assert (free["sequences"], free["depth"], limited["depth"], limited["deepest"]) == (2000, None, 3, 3)
    assert free["least_packs"] <= free["packs"] < limited["packs"]
    assert free["cpu_seconds"] > 0
    assert free["efficiency_percent"] == pytest.approx(100 * free["tokens"] / (512 * free["packs"]), abs=1e-4)
