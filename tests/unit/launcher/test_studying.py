"""This machine for studies of runs: groups of devices, commands on them, and forwarded stop requests."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.launcher import studying
from evenpack.launcher.studying import ThisMachine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ThisMachine:
    """Returns a machine of four cores, without a GPU."""
    monkeypatch.setattr(studying, "cpu_cores", lambda: 4)
    monkeypatch.setattr(studying, "cuda_devices", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return ThisMachine()


@pytest.mark.parametrize(("asked", "ranks"), [(None, [4]), (1, [1] * 4), (2, [2, 2]), (3, [3])])
def test_cores_are_divided_among_runs(machine: ThisMachine, asked: int | None, ranks: list[int]) -> None:
    found = machine.device_groups(asked)
    assert [place.ranks for place in found] == ranks
    assert {place.train_options for place in found} == {("--cpu-ranks", str(ranks[0]))}
    assert {place.environment["OMP_NUM_THREADS"] for place in found} == {"1"}


def test_gpus_are_divided_among_runs(machine: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "cuda_devices", lambda: 4)
    assert [place.environment for place in machine.device_groups(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    (place,) = machine.device_groups(None)
    assert place.environment == {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}
    assert place.train_options == ("--num-gpus", "4")


@pytest.mark.parametrize(("asked", "message"), [(0, "at least 1, found 0"), (5, "this machine shows 4 cores")])
def test_devices_that_are_not_there_are_refused(machine: ThisMachine, asked: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine.device_groups(asked)


def test_a_command_gets_its_arguments_its_devices_and_a_log(
    machine: ThisMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows = "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(studying, "_COMMAND", (sys.executable, "-c", shows))
    log = tmp_path / "study.log"
    place = machine.device_groups(2)[0]
    for command in ("prepare", "train"):
        assert place.start(command, Path("run.yaml"), ["a=1"], log=log).wait() == 3
    place.start("evaluate", Path("run.yaml"), ["a=1"], log=log, options=["--save", "b.json"]).wait()
    assert log.read_text().splitlines() == [
        "['prepare', 'run.yaml', 'a=1'] 1",
        "['train', 'run.yaml', 'a=1', '--cpu-ranks', '2'] 1",
        "['evaluate', 'run.yaml', 'a=1', '--save', 'b.json'] 1",
    ]


def test_a_request_to_stop_reaches_each_run_once(
    machine: ThisMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saves = (
        "import signal, sys, time\n"
        "def stop(*_): print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(studying, "_COMMAND", (sys.executable, "-c", saves))
    before = signal.getsignal(signal.SIGTERM)
    log = tmp_path / "study.log"
    with machine.held(tmp_path):
        process = machine.device_groups(4)[0].start("train", Path("run.yaml"), [], log=log)
        while "ready" not in log.read_text():
            time.sleep(0.01)
        assert not machine.is_stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait() == 75
        assert machine.is_stop_requested
    assert log.read_text().count("saved") == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_of_the_study_leaves_no_run_behind(
    machine: ThisMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(studying, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match="disk"), machine.held(tmp_path):  # noqa: PT012
        process = machine.device_groups(4)[0].start("train", Path("run.yaml"), [], log=tmp_path / "log")
        raise RuntimeError("the disk is full")
    assert process.returncode == -signal.SIGTERM
