"""What is said when a loader's process ends, and what it says when its rank does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tiny_run import lone_world, tiny_gpt2_run
from torch.utils.data import DataLoader, Dataset

from evenpack.data.batches.loader_processes import (
    begin_loader_process,
    explained_loader_deaths,
    explained_lost_loader,
)
from evenpack.engine.train import train_in
from evenpack.errors import RunError

KILLED_WHILE_IT_TAKES_A_BATCH = """
import os, signal, threading, time
from multiprocessing import Process, Pipe, resource_sharer
from multiprocessing.connection import Client
from multiprocessing.process import current_process
from evenpack.data.batches.loader_processes import begin_loader_process

def hand_over(connection, is_loader):
    if is_loader:
        begin_loader_process(0)
    connection.send((resource_sharer.DupFd(0)._id, bytes(current_process().authkey)))
    time.sleep(1.0)
    resource_sharer.stop()

def take(address, key):
    connection = Client(address[0])  # without the answer to the challenge
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    import sys
    ours, theirs = Pipe()
    loader = Process(target=hand_over, args=(theirs, sys.argv[1] == "loader"))
    loader.start()
    taker = Process(target=take, args=ours.recv())
    taker.start()
    taker.join()
    loader.join()
"""


DIES_AS_ITS_LOADER_STARTS = """
import os, signal, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from evenpack.data.batches.loader_processes import begin_loader_process

class SlowToArrive:
    def __init__(self, told):
        self.told = told
    def __reduce__(self):
        return arrive, (self.told, os.getpid())
    def __getitem__(self, index):
        return index

def arrive(told, rank):
    while os.getppid() == rank:
        time.sleep(0.01)
    Path(told).write_text(str(os.getpid()))
    return SlowToArrive(told)

if __name__ == "__main__":
    loader = DataLoader(SlowToArrive(sys.argv[1]), sampler=[0], batch_size=None, num_workers=1,
                        multiprocessing_context="spawn", worker_init_fn=begin_loader_process)
    batches = iter(loader)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_loader_ends_when_its_rank_has_died_before_it_could_watch_it(tmp_path: Path) -> None:
    """Once the rank is gone, another process is the parent of the loader, which torch would watch instead."""
    script, told = tmp_path / "script.py", tmp_path / "loader"
    script.write_text(DIES_AS_ITS_LOADER_STARTS)
    subprocess.run([sys.executable, script, told], check=False, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60.0
    while not (told.is_file() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    loader = int(told.read_text())
    try:
        psutil.Process(loader).wait(timeout=30.0)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        os.kill(loader, signal.SIGKILL)
        raise


@pytest.mark.parametrize(("process", "says"), [("loader", False), ("other", True)])
def test_a_loader_says_nothing_when_its_rank_is_killed_as_it_takes_a_batch(process: str, says: bool) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_IT_TAKES_A_BATCH, process]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("Traceback" in done.stderr) == says, done.stderr


class Killed(Dataset[int]):
    """Kills the process that reads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


def test_a_killed_process_of_a_loader_is_explained() -> None:
    with pytest.raises(RunError, match=r"loads batches has died: DataLoader worker .*lower training.loader_workers"):  # noqa: SIM117
        with explained_loader_deaths():
            next(iter(DataLoader(Killed(), num_workers=1)))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_loader_that_dies_as_a_batch_is_taken_is_explained(error: Exception) -> None:
    with pytest.raises(RunError, match="has died: the connection to it was lost"), explained_lost_loader():
        raise error


def test_a_death_that_is_explained_is_not_raised_once_more_by_torchs_handler() -> None:
    before = signal.signal(signal.SIGCHLD, _raise_again)
    try:
        with suppress(RunError), explained_loader_deaths():
            try:
                with explained_lost_loader():
                    raise EOFError
            finally:
                subprocess.run(["true"], check=True)  # its end is a SIGCHLD
        assert signal.getsignal(signal.SIGCHLD) is _raise_again
    finally:
        signal.signal(signal.SIGCHLD, before)


def _raise_again(*_: object) -> None:
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


def test_the_loader_of_a_run_explains_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_loader: object) -> Iterator[object]:
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    monkeypatch.setattr(DataLoader, "__iter__", lost)
    config = tiny_gpt2_run(tmp_path)
    with lone_world() as world, pytest.raises(RunError, match="has died: the connection to it was lost"):
        train_in(world, config, stop_requested=lambda: False)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="must match"), explained_loader_deaths():
        torch.ones(2) + torch.ones(3)


class Raises(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise ValueError("item 7 of this data")

    def __len__(self) -> int:
        return 1


def test_errors_of_the_data_still_arrive() -> None:
    loader = DataLoader(Raises(), batch_size=None, num_workers=1, worker_init_fn=begin_loader_process)
    with pytest.raises(ValueError, match="item 7 of this data"):
        next(iter(loader))
