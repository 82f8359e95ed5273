"""Requests to stop: signals, files, the end of the process that started a command, and output that nobody takes."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evenpack.launch_environment import AGENT_STORE
from evenpack.launcher.processes.guard import Ancestors
from evenpack.launcher.processes.stop import (
    SAME_REQUEST_SECONDS,
    STOP_SIGNALS,
    StopFlag,
    StopRequest,
    read_stop_request,
    remove_stop_request,
    survive_readers,
    write_stop_request,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("launcher", "later", "ends"),
    [
        ("deepspeed", signal.SIGINT, True),
        ("deepspeed", signal.SIGTERM, False),  # which it sends for the first Ctrl-C
        ("torchrun", signal.SIGINT, True),
        ("torchrun", signal.SIGTERM, True),  # which it sends for the second Ctrl-C
        ("torchrun", signal.SIGHUP, False),
    ],
)
def test_a_second_ctrl_c_ends_the_process_and_signals_of_one_moment_do_not(
    launcher: str, later: signal.Signals, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    clock = [100.0]
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.delenv(AGENT_STORE, raising=False)
    if launcher == "torchrun":
        monkeypatch.setenv(AGENT_STORE, "True")
    StopFlag().install()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        clock[0] += SAME_REQUEST_SECONDS / 5
    assert codes == []
    clock[0] += SAME_REQUEST_SECONDS
    os.kill(os.getpid(), later)
    assert codes == ([130] if ends else [])


@pytest.mark.parametrize("agent_store", [None, "True"])
def test_a_second_sigterm_alone_does_not_end_the_process(
    agent_store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends one more before its SIGKILL, half a minute in which a save may still end."""
    codes: list[int] = []
    clock = [100.0]
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    if agent_store is not None:
        monkeypatch.setenv(AGENT_STORE, agent_store)
    StopFlag().install()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        clock[0] += 10 * SAME_REQUEST_SECONDS
    assert codes == []


def test_a_signal_that_nohup_has_set_to_be_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag = StopFlag()
    flag.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag.is_set()


def test_a_request_reaches_the_run_that_it_names_and_no_other(tmp_path: Path) -> None:
    request = StopRequest(run_id="this", at_once=False)
    write_stop_request(tmp_path, request)
    assert read_stop_request(tmp_path, "this") == request
    assert read_stop_request(tmp_path, "another") is None
    remove_stop_request(tmp_path)
    assert read_stop_request(tmp_path, "this") is None
    remove_stop_request(tmp_path)


def test_a_rank_knows_by_its_new_parent_that_its_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ancestors, parent = Ancestors(), os.getppid()
    assert ancestors.reason_to_end() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert ancestors.reason_to_end() == f"the launcher (process {parent}) has ended"


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
(place,) = studying.ThisMachine().device_groups(None)
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


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_written_to_a_full_disk_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        survive_readers()
        print("nobody reads this", flush=True)
        with pytest.raises(OSError, match="No space left"):
            os.write(stream.fileno(), b"while a plain stream fails")
        sys.stdout.close()


def test_files_get_every_line_and_streams_without_a_descriptor_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        print("before")
        memory = io.StringIO()
        monkeypatch.setattr(sys, "stderr", memory)
        survive_readers()
        print("after")
        assert sys.stderr is memory
        assert (tmp_path / "log").read_text() == "before\nafter\n"
        sys.stdout.close()
