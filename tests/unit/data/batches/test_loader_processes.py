"""What is said when a loader's process ends, and what it says when its rank does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from slow_cases import slow_but
from tiny_run import lone_world, tiny_gpt2_run
from torch.utils.data import DataLoader, Dataset

from evenpack.data.batches import loader_processes
from evenpack.data.batches.loader_processes import LoaderNames, explained_loader_deaths, explained_lost_loader
from evenpack.data.batches.pipeline import training_batches
from evenpack.engine import train
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.worker_pool import named_semaphores

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
    handle = ours.recv()
    print(os.listdir(os.environ["TMPDIR"]), flush=True)
    taker = Process(target=take, args=handle)
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("process", "leaves"), slow_but(["loader"], [("loader", False), ("other", True)]))
def test_the_socket_of_a_loader_is_no_file_which_would_stay_if_it_is_killed(process: str, leaves: bool) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_IT_TAKES_A_BATCH, process]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a name that sockets may have
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ("pymp-" in done.stdout) == leaves, done.stdout


class Killed(Dataset[int]):
    """Kills the process that reads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


def test_a_killed_process_of_a_loader_is_explained() -> None:
    with pytest.raises(RunError, match=r"loads batches has died: DataLoader worker .*\(training.loader_workers"):  # noqa: SIM117
        with explained_loader_deaths():
            next(iter(DataLoader(Killed(), num_workers=1)))


def test_a_death_that_is_explained_is_not_raised_once_more_by_torchs_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost before the process has ended."""
    monkeypatch.setattr(loader_processes, "_SECONDS_TO_SIGNAL", 60.0)
    before = signal.signal(signal.SIGCHLD, _raise_again)
    ending = subprocess.Popen(["sleep", "0.2"])
    try:
        with pytest.raises(RunError, match="the connection to it was lost"), explained_lost_loader():
            raise EOFError
        assert ending.poll() == 0, "its SIGCHLD was taken"
    finally:
        ending.wait()
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


def test_the_loader_of_a_run_starts_before_its_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def build(*_: object, **__: object) -> None:
        begun.append("model")
        raise RunError("enough")

    monkeypatch.setattr(DataLoader, "__iter__", lambda _: iter([begun.append("loader")]))
    monkeypatch.setattr(train, "build_at", build)
    with lone_world() as world, pytest.raises(RunError, match="enough"):
        train_in(world, tiny_gpt2_run(tmp_path), stop_requested=lambda: False)
    assert begun == ["loader", "model"]


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="must match"), explained_loader_deaths():
        torch.ones(2) + torch.ones(3)


def has_name(lock: Any) -> bool:
    return Path(f"/dev/shm/sem.{lock._semlock.name.strip('/')}").exists()


def test_names_are_removed_once_each_loader_has_begun_and_others_stay() -> None:
    context = multiprocessing.get_context("spawn")
    other = context.Lock()
    others = named_semaphores()
    own = context.Lock()
    names = LoaderNames(2, named_semaphores() - others)
    later = context.Lock()
    made = named_semaphores()
    names.taken(1)
    assert named_semaphores() == made
    names.taken(2)
    (left,) = made - named_semaphores()
    assert [has_name(one) for one in (other, own, later)] == [True, False, True]
    assert own.acquire(timeout=5.0), "who has opened it can use it"
    assert not left.still_active()


@pytest.mark.slow
def test_a_run_that_loads_has_no_names_after_its_first_step(tmp_path: Path) -> None:
    run = open_run(tiny_gpt2_run(tmp_path))
    settings = run.pipeline_settings(World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    others = named_semaphores()
    steps = training_batches(run.prepared, replace(settings, loader_workers=1), start_step=0, stop_step=2)
    later = multiprocessing.get_context("spawn").Lock()
    made_later = {one for one in named_semaphores() - others if one._args[0] == later._semlock.name}
    assert [named_semaphores() - others for _ in steps] == [made_later, made_later]
    assert has_name(later)
