"""A rank 0 that is stopped in a save, and woken after the same command has gone on: a real run for each launcher."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from small_run import COMMAND, HANGS_SECONDS, STEPS, evenpack, metrics, write_run

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

WORKER = (sys.executable, "-m", "evenpack.launcher.worker")
TRAIN = (*COMMAND, "train", "--cpu-ranks", "2")
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=1", "-m", "evenpack.launcher.worker")


def contents(output_dir: Path) -> dict[str, bytes]:
    files = (path for path in output_dir.rglob("*") if path.is_file())
    return {
        str(path): path.read_bytes() for path in files if "/ranks/" not in str(path) and ".partial" not in str(path)
    }


@pytest.mark.parametrize("command", [TRAIN, TORCHRUN, WORKER], ids=["evenpack train", "torchrun", "python"])
def test_the_same_command_goes_on_and_the_old_rank_changes_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    run_file, output_dir = write_run(tmp_path), tmp_path / "out"
    evenpack("prepare", run_file)
    (tmp_path / "stops").mkdir()
    (tmp_path / "stops" / "sitecustomize.py").write_text(STOPS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    stopping = {**environment, "PYTHONPATH": f"{tmp_path / 'stops'}:{os.environ.get('PYTHONPATH', '')}"}
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen([*command, str(run_file)], env=stopping, stdout=said, stderr=said)
    deadline, old = time.monotonic() + HANGS_SECONDS, None
    while old is None or old.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, (tmp_path / "said").read_text()
        time.sleep(0.1)
        status = read_json_object(output_dir / "ranks" / "rank_0.json")
        with suppress(psutil.NoSuchProcess):
            old = None if status is None else psutil.Process(status["process"]["pid"])
    started = [psutil.Process(first.pid), *psutil.Process(first.pid).children()]
    launchers = [process for process in started if process.pid != old.pid]
    for launcher in launchers:
        launcher.kill()
    try:
        if not launchers:  # nothing tells it from a rank that somebody debugs
            refused = subprocess.run(
                [*command, str(run_file)], env=environment, capture_output=True, text=True, check=False
            )
            assert refused.returncode == 2
            assert f"process {old.pid} on" in refused.stderr
            assert "which is stopped (kill -CONT" in refused.stderr
            old.kill()
            first.wait()
        again = subprocess.run([*command, str(run_file)], env=environment, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        assert (f"ending process {old.pid}, a rank of an earlier start" in again.stderr) == bool(launchers)
        before = contents(output_dir)
        with suppress(psutil.NoSuchProcess):
            old.send_signal(signal.SIGCONT)
        psutil.wait_procs([old], timeout=30)
        time.sleep(1.0)
    finally:
        for process in (old, *launchers):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        first.wait()
    assert contents(output_dir) == before
    assert [record["step"] for record in metrics(output_dir)] == list(range(1, STEPS + 1))
    assert find_candidates(output_dir / "checkpoints")[0].name == f"step_{STEPS:06d}"
    assert (output_dir / "checkpoints" / "latest").read_text() == f"step_{STEPS:06d}\n"
    assert list(output_dir.glob(".*.partial")) == []
