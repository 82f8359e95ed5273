"""Starts the process that trains with and without torch.compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NEEDS_A_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="there is no C++ compiler"
)


def results_of(folder: Path, *jobs: dict[str, object]) -> list[dict[str, object]]:
    """The result of each job, in order; see `compiled_process.py`."""
    command = [sys.executable, str(ROOT / "tests/compiled_process.py"), str(folder), *map(json.dumps, jobs)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(jobs), done.stderr
    return results
