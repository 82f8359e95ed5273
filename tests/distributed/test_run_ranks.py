"""The helper that other tests here use, which must be able to fail."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from forked_ranks import RanksFailed, preload, run_ranks

from evenpack.engine.world.distributed import World
from evenpack.errors import EvenpackError


def speak(world: World, word: str) -> tuple[str, list[int], str, float]:
    total = world.all_sum(torch.tensor([world.rank + 1.0], dtype=torch.float64))
    return (f"{word} {world.rank}", world.all_gather(world.rank), world.broadcast(f"from {world.rank}"), total.item())


def sum_the_wrong_type(world: World) -> None:
    world.all_sum(torch.ones(2, dtype=torch.float32))


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


def return_what_cannot_be_pickled(world: World) -> object:
    return lambda: world


def leave_traces(world: World) -> tuple[int, str | None, str | None, int]:
    """Returns state that an earlier run in the same processes could have left, and the caller's environment."""
    before = os.environ.get("A_TRACE")
    os.environ["A_TRACE"] = "left"
    return os.getpid(), before, os.environ.get("OF_THE_CALLER"), torch.get_num_threads()


def what_deepspeed_has_probed(world: World) -> dict[str, bool]:
    found: dict[str, bool] = vars(deepspeed.ops)["__compatible_ops__"]
    return found


def test_joining_on_a_cpu_compiles_nothing_to_learn_what_could_be_compiled() -> None:
    assert run_ranks(what_deepspeed_has_probed, 1) == [{"deepspeed_shm_comm": False}]


def test_ranks_talk_to_each_other_and_results_come_back_in_order() -> None:
    assert run_ranks(speak, 2, "rank") == [
        ("rank 0", [0, 1], "from 0", 3.0),
        ("rank 1", [0, 1], "from 0", 3.0),
    ]


def test_each_call_has_new_processes_with_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "seen")
    found = [*run_ranks(leave_traces, 2), *run_ranks(leave_traces, 1)]
    assert [rest for _, *rest in found] == [[None, "seen", 1]] * 3
    assert len({process for process, *_ in found} | {os.getpid()}) == 4


@pytest.mark.parametrize(
    ("function", "ranks", "message"),
    [
        (raise_on_rank_1, 2, r"(?s)rank 1: Traceback.*ValueError: the reason"),
        (die_on_rank_1, 2, "rank 1: exited without an error message"),
        (sleep_for_ever, 1, "rank 0: no answer within the time limit"),
        (return_what_cannot_be_pickled, 1, r"(?s)rank 0: Traceback.*pickle"),
        (sum_the_wrong_type, 1, r"(?s)rank 0: Traceback.*all_sum\(\) parameter vector=.*violates type hint"),
    ],
)
def test_a_rank_that_fails_is_reported_with_the_cause(function: Callable[..., Any], ranks: int, message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        run_ranks(function, ranks, timeout_seconds=1.0 if function is sleep_for_ever else 600.0)


def test_modules_to_begin_with_are_refused_once_ranks_were_started() -> None:
    run_ranks(speak, 1, "a")
    preload("checked_types")  # known already
    with pytest.raises(EvenpackError, match=r"preload\('json'\) must come before the first start"):
        preload("json")
