"""The timing of a step: its phases, its amounts, its clock and its peak of memory."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_run import PACK_LENGTH

from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.models.cost import step_flops, useful_work
from evenpack.studies.throughput.contenders import contender, run_to_measure
from evenpack.studies.throughput.measure import PhaseClock, Quartiles, StepTimer


def test_a_timed_step_counts_exactly_and_trains(world: World, config: RunConfig, prepared: PreparedData) -> None:
    run = run_to_measure(config)
    timer = StepTimer(run, world, clock="wall")
    packed = contender("packed", run, world)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in timer.engine.model.parameters()])
    step = timer.time_step_of(packed, 0)
    after = torch.cat([parameter.detach().flatten() for parameter in timer.engine.model.parameters()])
    assert (before != after).any()
    batches = [packed[index] for index in range(2)]
    assert step.slots == 8 * PACK_LENGTH
    assert step.tokens == batches[0].step_counts.tokens == sum(batch.local_counts.tokens for batch in batches)
    work = useful_work(batches[0]) + useful_work(batches[1])
    assert step.useful_flops == step_flops(config.model, vocabulary_size=prepared.vocabulary_size, work=work)
    assert step.micro_batches.slots.tolist() == [4 * PACK_LENGTH] * 2
    in_micro_batches = step.micro_batches.seconds.sum()
    assert in_micro_batches == pytest.approx(step.forward_seconds + step.backward_seconds)
    assert in_micro_batches < step.step_seconds
    assert step.loader_seconds > 0.0


def test_each_part_of_an_update_counts_in_its_phase(
    world: World, config: RunConfig, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    run = run_to_measure(config)
    timer = StepTimer(run, world, clock="wall")
    packed = contender("packed", run, world)
    deepspeed = timer.engine.deepspeed
    parts = {(deepspeed, "backward"): 0.25, (timer.engine.reduction, "finish"): 2.0, (deepspeed, "step"): 4.0}
    for (part, name), seconds in parts.items():
        monkeypatch.setattr(part, name, delayed(getattr(part, name), clock, seconds))
    step = timer.time_step_of(packed, 1)
    assert step.forward_seconds == step.loader_seconds == 0.0
    assert step.backward_seconds == 2 * 0.25
    assert step.all_reduce_seconds == 2.0
    assert step.update_seconds == 4.0
    assert step.step_seconds == 6.5
    assert step.micro_batches.seconds.tolist() == [0.25, 0.25]


class FakeClock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def delayed(function: Callable[..., Any], clock: FakeClock, seconds: float) -> Callable[..., Any]:
    """Takes the given time on that clock."""

    def run(*arguments: Any, **named: Any) -> Any:
        clock.now += seconds
        return function(*arguments, **named)

    return run


def test_the_cpu_clock_is_refused_where_it_would_mislead(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="on cuda: leave --clock out"):
        PhaseClock(torch.device("cuda"), "cpu")
    with pytest.raises(ConfigError, match="found 2 ranks"):
        StepTimer(open_run(config), replace(world, size=2), clock="cpu")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=1"):
        PhaseClock(torch.device("cpu"), "cpu")
    PhaseClock(torch.device("cpu"), "wall", ranks=2)


@pytest.mark.slow
def test_peak_memory_rises_by_what_a_step_takes() -> None:
    """It runs in its own process: if the system cannot reset the peak, an earlier test may have set a higher one."""
    held = 200_000_000
    script = (
        "import numpy as np\n"
        "import torch\n"
        "from evenpack.studies.throughput.measure import PeakMemory\n"
        "memory = PeakMemory(torch.device('cpu'))\n"
        "memory.reset()\n"
        "before = memory.bytes()\n"
        f"held = np.ones({held}, dtype=np.uint8)\n"
        "print(memory.bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.8 * held < int(done.stdout) < 1.2 * held


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Quartiles.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Quartiles(median=3.0, quartile_1=2.0, quartile_3=4.0)
