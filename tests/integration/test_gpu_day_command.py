"""The three calls of the GPU day, with tiny models on the CPU: each exits with 0 and leaves its rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.mark.slow
def test_every_call_leaves_its_rows(tmp_path: Path) -> None:
    for call in ("1", "2", "3"):
        places = ["--directory", str(tmp_path / call), "--scratch", str(tmp_path / "scratch")]
        command = [sys.executable, str(ROOT / "scripts/gpu_day"), call, "--tiny", *places]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = (tmp_path / call).glob("cpu_20*.json")
        value = json.loads(path.read_text())
        assert {"command", "commit", "date", "device", "driver", "torch"} <= set(value)
        assert value["rows"]
        for row in value["rows"]:
            assert row.get("left_out") or row["seconds"] > 0
            assert row.get("is_right", True)
