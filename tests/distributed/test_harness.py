"""The helper that the other tests here stand on: it must be able to fail."""

import os
import signal
import time

import pytest
import torch
from harness import RanksFailed, run_ranks

from evenpack.engine.distributed import World


def speak(world: World, word: str) -> tuple[str, list[int], str, float]:
    total = world.all_sum(torch.tensor([world.rank + 1.0], dtype=torch.float64))
    return (f"{word} {world.rank}", world.all_gather(world.rank), world.broadcast(f"from {world.rank}"), total.item())


def raise_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the reason")
    world.barrier()


def die_on_rank_1(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def sleep_for_ever(world: World) -> None:
    time.sleep(3600)


def test_ranks_talk_to_each_other_and_results_come_back_in_order():
    assert run_ranks(speak, 2, "rank") == [
        ("rank 0", [0, 1], "from 0", 3.0),
        ("rank 1", [0, 1], "from 0", 3.0),
    ]


def test_a_rank_that_raises_is_reported_with_its_traceback():
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: Traceback.*ValueError: the reason"):
        run_ranks(raise_on_rank_1, 2)


def test_a_rank_that_is_killed_is_reported():
    with pytest.raises(RanksFailed, match="rank 1: exited without an error message"):
        run_ranks(die_on_rank_1, 2)


def test_ranks_that_hang_are_killed_at_the_time_limit():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0: no answer within the time limit"):
        run_ranks(sleep_for_ever, 1, timeout_seconds=8.0)
    assert time.monotonic() - started < 60.0
