"""Whoever ends a run's processes leaves multiprocessing's resource tracker out, which removes what they have left."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenpack.launcher.processes.supervise import kill_session

HAS_NAMES = """
import multiprocessing, sys, time
from multiprocessing import shared_memory
from evenpack.launcher.processes.guard import end_process

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    tracked = shared_memory.SharedMemory(create=True, size=8)  # only the tracker removes it
    print(tracked.name, queue._rlock._semlock.name.strip("/").join(("sem.", "")), flush=True)
    if sys.argv[1] == "end_process":
        end_process(7)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end_process", "kill_session"])
def test_nothing_with_a_name_outlives_a_process_that_is_ended(how: str, tmp_path: Path) -> None:
    script = tmp_path / "has_names.py"
    script.write_text(HAS_NAMES)
    run = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    names = run.stdout.readline().split()
    assert len(names) == 2
    if how == "kill_session":
        assert all(Path("/dev/shm", name).exists() for name in names)
        kill_session(run.pid)
    _, said = run.communicate(timeout=60)
    deadline = time.monotonic() + 30.0
    while (left := [name for name in names if Path("/dev/shm", name).exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    if how == "end_process":
        assert run.returncode == 7
        assert "leaked semaphore" not in said, "it has removed them itself"
