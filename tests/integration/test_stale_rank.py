"""A rank 0 that is stopped in a save, and has outlived its launcher: a real run."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from small_run import HANGS_SECONDS, STEPS, evenpack, metrics, write_run

from evenpack.engine.checkpoints.files import find_candidates
from evenpack.launcher.processes.ranks import read_json_object

pytestmark = pytest.mark.slow

STOPS = """
import os, signal
replace = os.replace

def stop_before_latest(old, new, **options):
    if str(new).endswith("/latest"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return replace(old, new, **options)

os.replace = stop_before_latest
"""
"""Stops a process between the rename of a checkpoint and its name in `latest`."""

TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=1", "-m", "evenpack.launcher.worker")


def test_a_run_beside_a_stopped_rank_is_refused_and_goes_on_once_that_has_ended(tmp_path: Path) -> None:
    run_file, output_dir = write_run(tmp_path), tmp_path / "out"
    evenpack("prepare", run_file)
    (tmp_path / "stops").mkdir()
    (tmp_path / "stops" / "sitecustomize.py").write_text(STOPS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    stopping = {**environment, "PYTHONPATH": f"{tmp_path / 'stops'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [*TORCHRUN, str(run_file)]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(command, env=stopping, stdout=said, stderr=said)
    deadline, old = time.monotonic() + HANGS_SECONDS, None
    while old is None or old.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
        time.sleep(0.1)
        status = read_json_object(output_dir / "ranks" / "rank_0.json")
        with suppress(psutil.NoSuchProcess):
            old = None if status is None else psutil.Process(status["process"]["pid"])
    first.kill()
    first.wait()
    try:
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert refused.returncode != 0
        assert f"process {old.pid} on" in refused.stderr
        assert "which is stopped (kill -CONT" in refused.stderr
        old.send_signal(signal.SIGCONT)
        old.wait(timeout=60)  # its launcher has ended
    finally:
        with suppress(psutil.NoSuchProcess):
            old.kill()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in metrics(output_dir)] == list(range(1, STEPS + 1))
    assert find_candidates(output_dir / "checkpoints")[0].name == f"step_{STEPS:06d}"
    assert (output_dir / "checkpoints" / "latest").read_text() == f"step_{STEPS:06d}\n"
    assert list(output_dir.glob(".*.partial")) == []
