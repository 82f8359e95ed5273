"""A loader's process says nothing when its rank is killed, and everything else."""

import subprocess
import sys

import pytest
from torch.utils.data import DataLoader, Dataset

from evenpack.data.batches.loader_processes import begin_loader_process

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


@pytest.mark.parametrize(("process", "says"), [("loader", False), ("other", True)])
def test_a_loader_says_nothing_when_its_rank_is_killed_as_it_takes_a_batch(process: str, says: bool) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_IT_TAKES_A_BATCH, process]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("Traceback" in done.stderr) == says, done.stderr


class Raises(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise ValueError("item 7 of this data")

    def __len__(self) -> int:
        return 1


def test_errors_of_the_data_still_arrive() -> None:
    loader = DataLoader(Raises(), batch_size=None, num_workers=1, worker_init_fn=begin_loader_process)
    with pytest.raises(ValueError, match="item 7 of this data"):
        next(iter(loader))
