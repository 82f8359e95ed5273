"""A rank accumulates times and work until they are gathered."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from loop_steps import ALONE, step_of
from waiting_ranks import over_ranks

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.engine import LocalStep, Stopwatch
from evenpack.engine.parts.rank_times import RankTimes
from evenpack.engine.reporting.rank_waits import FIT_STEPS, LEARNING_STEPS, WARM_UP_STEPS, WaitModel
from evenpack.engine.reporting.run_record import Place


def batch(*lengths: int) -> PackedBatch:
    packs = [random_sequences(lengths, vocabulary_size=9)]
    return build_batch(packs, "padded", max_sequence_length=8)[0]


def test_sums_are_over_all_micro_batches_of_all_steps_since_the_last_telling() -> None:
    times = RankTimes(ALONE, every_steps=1)
    times.add([batch(3, 5), batch(8)], 1.0)
    times.add([batch(2), batch(1, 1, 1)], 3.0)
    assert times.gather() == {
        "steps": 2,
        "compute_seconds": [4.0],
        "compute_seconds_max": [3.0],
        "compute_seconds_deviation": [1.0],
        "sequences": [7],
        "tokens": [21],
        "slots": [56],
        "squared_lengths": [9 + 25 + 64 + 4 + 3],
    }
    times.add([replace(batch(4), squared_lengths=16, pairs_within={1: 10, 3: 16})] * 2, 0.25)
    again = times.gather()
    assert (again["steps"], again["compute_seconds"], again["tokens"]) == (1, [0.25], [8])
    assert again["pairs_within"] == {"1": [20], "3": [32]}


def test_a_rank_that_becomes_slow_says_so_once_and_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """The other rank of two is its twin, until this one takes half as long again."""
    first_judged, last = WARM_UP_STEPS + FIT_STEPS + LEARNING_STEPS + 1, 300
    model = WaitModel(rank_count=2, planned_steps=last)
    place = Place(host="node7", device="cuda:3", model="H100")
    times = RankTimes(ALONE, every_steps=50, model=model, place=place)
    recorded: dict[int, dict[str, Any]] = {}
    with caplog.at_level(logging.WARNING, logger="evenpack"):
        for number in range(1, last + 1):
            slow = 1.5 if number > first_judged + 20 else 1.0
            update = update_of(times, own=0.1 * slow, other=0.1 * (1.0 + 0.01 * (number % 3)))
            training = SimpleNamespace(stop_step=last, target_accuracy=None)
            values = {"waits": None, "rank_times": None, "evaluations": None, "stop": False, "_training": training}
            values["_part_ends"] = last
            one = step_of(number, update=update, **values)
            times.after_step(one)
            times.recording(one)
            if one.rank_times is not None:
                recorded[number] = one.rank_times
    (message,) = caplog.messages
    assert message.startswith(f"rank 0 on node7, cuda:3 (H100), is slow since about step {first_judged + 21}: its ")
    assert "% longer than those of others" in message
    assert "split_steps" in recorded[50], "from the 31st step on"
    named = next(number for number, values in recorded.items() if values.get("compute_slow_since") != [None])
    assert named < first_judged + 40, "gathered at once, and not at the next hundred"
    found = recorded[named]
    assert found["compute_slow_since"] == [first_judged + 21]
    assert found["compute_slow_by"] == [pytest.approx(0.5, rel=0.1)]
    assert found["loader_slow_since"] == [None]
    assert recorded[200]["waited_for_seconds"][0] == 0.0


class Stopped(Stopwatch):
    """A stopwatch that has run for so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds

    def busy_seconds(self) -> float:
        return self._seconds


def update_of(times: RankTimes, *, own: float, other: float) -> Any:
    """Returns a step of this rank and its twin, each with a micro-batch of the same cost."""
    batches = StepBatches(step=0, micro_batches=(replace(batch(3, 5), cost=7.0),))
    local = LocalStep(
        loss_sums={},
        optimised_losses={},
        correct={},
        gradient_norm=torch.tensor(1.0),
        local_gradient_norm=None,
        left_eager=None,
        stopwatch=Stopped(own),
    )
    values = times.wait_values(batches, local, loader_seconds=0.0)
    assert values is not None
    sums, maxima = values
    twin, slower = _times(sums, other / own), _times(maxima, max(other / own, 1.0))
    planned = replace(twin.arrival, planned=sums.arrival.planned)
    twin = replace(twin, cost=sums.cost, cost_squares=sums.cost_squares, arrival=planned, slow=0)
    waits = (over_ranks(sum, [sums, twin]), slower)
    return SimpleNamespace(batches=batches, local=local, totals=SimpleNamespace(waits=waits))


def _times(value: Any, factor: float) -> Any:
    return over_ranks(lambda one: type(one[0])(factor * one[0]), [value])
