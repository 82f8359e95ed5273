"""A loader's process that is killed: the error names it and says what to do."""

import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from evenpack.engine.dead_loaders import explained_loader_deaths
from evenpack.errors import RunError


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


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="must match"), explained_loader_deaths():
        torch.ones(2) + torch.ones(3)
