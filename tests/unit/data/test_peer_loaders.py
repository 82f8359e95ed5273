"""The benchmark of loaders by others, as a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
def test_the_command_finds_evenpack_exact_on_one_and_two_ranks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks/peers/loaders.py"), "--only", "evenpack", "--json", str(report)]
    settings = ["--documents", "200", "--pack-length", "256", "--rounds", "1", "--vocabulary", "512"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(report.read_text())["loaders"]["evenpack"]
    assert "failed" not in found
    assert (found["borders_shown"], found["leak"], found["steps_shared_by_ranks"]) == (1, 0, 1)
    assert [found[f"epoch_{ranks}"]["read"] for ranks in (1, 2)] == [1, 1]
    for before in (1, 2):
        assert found[f"resume_{before}_{before}"]["same_token_for_token"]
        for ranks in (1, 2):
            resumed = found[f"resume_{before}_{ranks}"]
            assert (resumed["steps_of_uninterrupted"], resumed["read"], resumed["repeated"]) == (1, 1, 0)
    assert found["tokens_per_cpu_second"] > 0
