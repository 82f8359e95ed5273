"""Workers end with the process that started them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from slow_cases import slow_but

from evenpack.worker_pool import worker_pool

_BUSY = """
import multiprocessing, time
from evenpack.worker_pool import worker_pool
if __name__ == "__main__":
    with worker_pool(2) as pool:
        at_work = [pool.submit(time.sleep, 600) for _ in range(2)]
        while not all(one.running() for one in at_work):
            time.sleep(0.01)
        print(multiprocessing.util.get_temp_dir(), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("name", slow_but(["short"], ["short", "longer than a socket's name may be " * 3]))
def test_workers_of_a_process_that_is_killed_end_in_the_middle_of_their_work(tmp_path: Path, name: str) -> None:
    script = tmp_path / "busy.py"
    script.write_text(_BUSY)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        temporary = Path(folder, name)
        temporary.mkdir()
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as run:
            assert run.stdout is not None
            sockets = Path(run.stdout.readline().rstrip("\n"))
            assert sockets.is_dir()
            assert sockets.parent == (temporary if name == "short" else Path("/tmp"))
            workers = psutil.Process(run.pid).children(recursive=True)
            assert len(workers) >= 2
            run.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        assert not sockets.exists()
        assert list(temporary.iterdir()) == []


def test_an_error_ends_workers_at_once() -> None:
    with suppress(KeyError), worker_pool(1, environment={"EVENPACK_TESTED": "yes"}) as pool:
        assert pool.submit(os.getenv, "EVENPACK_TESTED").result() == "yes"
        asleep = pool.submit(time.sleep, 600)
        while not asleep.running():
            time.sleep(0.01)
        raise KeyError
    assert "EVENPACK_TESTED" not in os.environ
