"""The commands that a study has started end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMAND = """
import os, signal, subprocess, sys, time
from pathlib import Path
from evenpack.launcher.cli import app

told = Path(sys.argv[2])

def end(*_):
    told.with_suffix(".ended").touch()
    child.kill()
    sys.exit(75)

def command():
    global child
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    signal.signal(signal.SIGTERM, end)
    told.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    told.with_suffix(".new").rename(told)
    time.sleep(1000)

app.app = command
app.main()
"""

STUDY = """
import os, signal, sys, time
from pathlib import Path
from evenpack.launcher import studying

command, told, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
studying._COMMAND = (sys.executable, "-c", command)
(place,) = studying.ThisMachine().places(None)
place.start("prepare", told, [], log=log)
while not told.exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_command_of_a_study_that_is_killed_ends_as_after_a_sigterm(tmp_path: Path) -> None:
    told = tmp_path / "told"
    study = [sys.executable, "-c", STUDY, COMMAND, told, tmp_path / "log"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    assert subprocess.run(study, env=environment, check=False, timeout=120.0).returncode == -signal.SIGKILL
    processes = [int(number) for number in told.read_text().split()]
    deadline = time.monotonic() + 30.0
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [number for number in processes if is_alive(number)]
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert left == []
    assert told.with_suffix(".ended").exists()


def test_a_lifeline_is_none_of_the_standard_streams() -> None:
    """A study that was started without them would give its commands a stream in place of the pipe."""
    script = (
        "import os\n"
        "for stream in range(3): os.close(stream)\n"
        "from evenpack.launcher.processes.stop import Lifeline\n"
        "os._exit(min(Lifeline().pass_fds))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode >= 3


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
