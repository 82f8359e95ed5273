"""Workers end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from evenpack.worker_pool import worker_pool

_BUSY = """
import time
from evenpack.worker_pool import worker_pool
if __name__ == "__main__":
    with worker_pool(2) as pool:
        at_work = [pool.submit(time.sleep, 600) for _ in range(2)]
        while not all(one.running() for one in at_work):
            time.sleep(0.01)
        print("busy", flush=True)
        time.sleep(600)
"""


def test_workers_of_a_process_that_is_killed_end_in_the_middle_of_their_work(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(_BUSY)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "busy\n"
        workers = psutil.Process(run.pid).children(recursive=True)
        assert len(workers) >= 2
        run.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_an_error_ends_workers_at_once() -> None:
    with suppress(KeyError), worker_pool(1, environment={"EVENPACK_TESTED": "yes"}) as pool:
        assert pool.submit(os.getenv, "EVENPACK_TESTED").result() == "yes"
        asleep = pool.submit(time.sleep, 600)
        while not asleep.running():
            time.sleep(0.01)
        raise KeyError
    assert "EVENPACK_TESTED" not in os.environ
