"""Waits are split exactly, slow ranks are named within the steps that are promised, and healthy ones are not."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from waiting_ranks import FIXED, MEAN_COST, PER_COST, Seconds, expected_delay, watch

from evenpack.engine.reporting.rank_waits import FIT_STEPS, LEARNING_STEPS, SLOWDOWN, WARM_UP_STEPS, Rule, SlowTest

RANKS = 4
FIRST_SPLIT = WARM_UP_STEPS + FIT_STEPS + 1
FIRST_JUDGED = FIRST_SPLIT + LEARNING_STEPS
ONSET, END = 400, 600


def noise(share: float, *, steps: int = 800, ranks: int = RANKS, seed: int = 1) -> np.ndarray:
    return share * np.random.default_rng(seed).standard_normal((steps, ranks))


def of_rank_2(by: Callable[[int], float]) -> Callable[[int], Seconds]:
    """Returns what slows rank 2 down from ONSET to END, by its step from 1."""
    return lambda step: np.array([0.0, 0.0, by(step - ONSET + 1) if ONSET <= step < END else 0.0, 0.0])


def test_waits_are_split_from_the_promised_step_on_and_add_up_to_what_was_waited() -> None:
    found = watch(noise(0.02, steps=200), loader=lambda step: np.array([0.0, 0.01 * (step % 3), 0.0, 0.0]))
    assert [step for step, of in enumerate(found.explained, 1) if of[0] is not None] == list(range(FIRST_SPLIT, 201))
    for explained, compute, loader in list(zip(found.explained, found.compute, found.loader, strict=True))[50:]:
        last = (compute + loader).max()
        waited = 0.0
        for rank, one in enumerate(explained):
            assert one is not None
            assert sum(vars(one.own).values()) == pytest.approx(last - compute[rank])
            waited += one.waited_for
        assert one is not None
        assert sum(vars(one.mean).values()) == pytest.approx(last - compute.mean())
        assert one.mean.loader == pytest.approx(last - compute.max(), abs=1e-15)
        assert waited == pytest.approx((last - compute - loader).sum()), "all waits are charged to the last one"


def test_of_steady_ranks_all_waits_are_the_plans() -> None:
    found = watch(noise(0.0))
    one = found.explained[-1][0]
    assert one is not None
    expected = found.compute[-1].max() - found.compute[-1].mean()
    assert one.mean.plan == pytest.approx(expected, rel=1e-6)
    assert (one.mean.machine, one.mean.noise) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    for model in found.models:
        assert model._fit.line() == (pytest.approx(FIXED), pytest.approx(PER_COST))


def test_the_wait_for_a_slow_rank_is_the_machines() -> None:
    found = watch(noise(0.002), cost_spread=0.001, fault=of_rank_2(lambda step: 0.2))
    during = [of[0] for of in found.explained[ONSET + 60 : END - 1]]
    seconds = FIXED + PER_COST * MEAN_COST
    assert np.mean([one.mean.machine for one in during if one]) == pytest.approx(0.2 * seconds * 3 / 4, rel=0.02)
    assert np.mean([one.mean.plan for one in during if one]) < 0.002 * seconds
    waited_for = np.array([[one.waited_for for one in of if one] for of in found.explained[ONSET + 60 : END - 1]])
    assert waited_for.sum(axis=0)[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("by", "within"),
    [
        pytest.param(lambda step: 0.05, 2.0, id="constant 5 %"),
        pytest.param(lambda step: 0.2, 2.0, id="constant 20 %"),
        pytest.param(lambda step: min(0.002 * step, 0.3), None, id="creeping by 0.2 % a step"),
        pytest.param(lambda step: 0.6 * (step % 4 == 0), None, id="60 % in every fourth step"),
    ],
)
def test_a_rank_that_becomes_slow_is_named_in_time_and_its_recovery_too(
    by: Callable[[int], float], within: float | None
) -> None:
    found = watch(noise(0.01), fault=of_rank_2(by))
    rule = found.models[2].tests["compute"].rule
    assert rule is not None
    assert rule.slowdown == pytest.approx(SLOWDOWN)
    assert [(event.rank, event.kind) for event in found.events] == [(2, "compute")] * 2, "and no other rank"
    slow, well = found.events
    most = 60 if within is None else within * expected_delay(rule, by(1))
    assert ONSET <= slow.step < ONSET + most
    assert slow.since is not None
    assert ONSET - 5 <= slow.since <= slow.step
    if within is not None:
        assert slow.slow_by == pytest.approx(by(1), rel=0.25)
    assert well.since is None
    recovery = rule.sums[0].threshold / rule.reference  # steps, as an expectation
    assert END <= well.step < END + 2 * recovery


def test_a_loader_that_becomes_slow_is_named_as_such() -> None:
    found = watch(noise(0.01), loader=lambda step: 0.02 * of_rank_2(lambda _: 1.0)(step))
    slow, well = found.events
    assert (slow.rank, slow.kind, well.since) == (2, "loader", None)
    assert slow.slow_by == pytest.approx(0.02 / (FIXED + PER_COST * MEAN_COST), rel=0.1)
    assert ONSET <= slow.step < ONSET + 10


def test_a_rank_that_is_slower_from_the_start_is_named() -> None:
    found = watch(noise(0.01), slowness=np.array([0.0, 0.0, 0.0, 0.1]))
    (event,) = found.events
    assert (event.rank, event.slow_by) == (3, pytest.approx(0.1, abs=0.01))
    assert found.models[3].slowness == pytest.approx(0.1 * 3 / 4, abs=0.01)
    one = found.explained[-1][0]
    assert one is not None
    assert one.mean.machine > 0.04 * FIXED, "its waits are charged to it in any case"


def test_no_other_rank_is_named_when_a_rank_slow_from_the_start_recovers() -> None:
    found = watch(noise(0.01), fault=lambda step: np.array([0.0, 0.0, 0.3 if step < ONSET else 0.0, 0.0]))
    assert [(event.rank, event.since is None) for event in found.events] == [(2, False), (2, True)]
    assert ONSET <= found.events[1].step < END


def test_unequal_work_is_not_taken_for_a_slow_rank() -> None:
    found = watch(noise(0.01), cost_spread=0.15)
    assert np.std([compute[2] for compute in found.compute]) > 0.08 * (FIXED + PER_COST * MEAN_COST)
    assert found.events == []


def heavy(steps: int, ranks: int, seed: int) -> np.ndarray:
    """Returns 2 % noise, in which one step of 200 takes up to twice its time."""
    generator = np.random.default_rng(seed)
    stalls = (generator.random((steps, ranks)) < 0.005) * generator.random((steps, ranks))
    return np.asarray(0.02 * generator.standard_normal((steps, ranks)) + stalls)


def correlated(steps: int, ranks: int, seed: int) -> np.ndarray:
    """Returns 2 % noise of which a step has 0.6 of the step before."""
    generator = np.random.default_rng(seed)
    found = 0.016 * generator.standard_normal((steps, ranks))
    for step in range(1, steps):
        found[step] += 0.6 * found[step - 1]
    return found


@pytest.mark.parametrize("made", [heavy, correlated], ids=["stalls", "steps alike their neighbours"])
def test_healthy_ranks_are_not_named(made: Callable[[int, int, int], np.ndarray]) -> None:
    assert watch(made(1500, 8, 0)).events == []


@pytest.mark.parametrize("kind", ["normal", "t", "exponential"])
def test_false_alarms_stay_below_the_bound_that_is_asked_for(kind: str) -> None:
    """The bound is for noise of any law: of a run of 200 steps 200 / 400, and most are far below it."""
    generator = np.random.default_rng(3)
    draw = {
        "normal": generator.standard_normal,
        "t": lambda size: generator.standard_t(3, size),
        "exponential": lambda size: generator.exponential(size=size) - 1.0,
    }[kind]
    alarms, runs = 0, 100
    for _ in range(runs):
        test = SlowTest(per_step=1 / 400)
        excesses = 0.07 * draw(LEARNING_STEPS + 200)
        alarms += any(test.observe(step, excess) for step, excess in enumerate(excesses.tolist(), 1))
    assert alarms / runs <= 0.1


def test_a_rank_that_varies_more_is_judged_by_larger_slowdowns_and_says_so() -> None:
    learned = 0.3 * np.random.default_rng(0).standard_normal(LEARNING_STEPS)
    rule = Rule.learn(learned, per_step=1e-8)
    assert rule.slowdown >= 8 * 0.9 * rule.scale / math.sqrt(LEARNING_STEPS) / (1 - rule.memory)
    assert rule.slowdown > 2 * SLOWDOWN
    assert math.isinf(expected_delay(rule, rule.slowdown / 2))
    assert expected_delay(rule, rule.slowdown) < 200
