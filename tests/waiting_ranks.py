"""Ranks of a cluster that is made up, step by step, through the model that explains their waits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from evenpack.engine.reporting.rank_waits import ExplainedStep, Kind, Rule, WaitModel

FIXED, PER_COST = 0.04, 6e-8
"""Seconds of a micro-batch on an ordinary rank: by itself, and for each unit of cost."""
MEAN_COST = 1e6

Seconds = Float64[np.ndarray, " ranks"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A rank that has become slow, or well again (`since` is None then)."""

    step: int
    rank: int
    kind: Kind
    since: int | None
    slow_by: float | None


@dataclass(kw_only=True)
class Watched:
    """What the model said of a run."""

    models: list[WaitModel]
    events: list[Event] = field(default_factory=list)
    explained: list[list[ExplainedStep | None]] = field(default_factory=list)
    """For each step, of each rank."""
    compute: list[Seconds] = field(default_factory=list)
    loader: list[Seconds] = field(default_factory=list)


def watch(
    noise: Float64[np.ndarray, "steps ranks"],
    *,
    cost_spread: float = 0.02,
    seed: int = 0,
    slowness: Seconds | float = 0.0,
    fault: Callable[[int], Seconds | float] = lambda step: 0.0,
    loader: Callable[[int], Seconds | float] = lambda step: 0.0,
) -> Watched:
    """Runs ranks whose seconds vary by `noise`, as a share of what their work needs.

    Args:
        cost_spread: relative standard deviation of the ranks' costs in a step.
        slowness: share by which ranks need more from the start on.
        fault: the same in a step, counted from 1.
        loader: seconds for which ranks wait for their batches in a step.
    """
    generator = np.random.default_rng(seed)
    steps, ranks = noise.shape
    found = Watched(
        models=[WaitModel(rank_count=ranks, planned_steps=steps) for _ in range(ranks)],
    )
    for step in range(1, steps + 1):
        cost = MEAN_COST * (1.0 + cost_spread * generator.standard_normal(ranks))
        compute = (FIXED + PER_COST * cost) * (1.0 + slowness) * (1.0 + fault(step)) * (1.0 + noise[step - 1])
        waited = 1e-5 * generator.random(ranks) + loader(step)
        found.explained.append(_step(found, step, cost, compute, waited))
        found.compute.append(compute)
        found.loader.append(waited)
    return found


def _step(found: Watched, step: int, cost: Seconds, compute: Seconds, waited: Seconds) -> list[ExplainedStep | None]:
    values = [
        model.own_values(cost=own, work=seconds, compute=seconds, loader=late)
        for model, own, seconds, late in zip(
            found.models, cost.tolist(), compute.tolist(), waited.tolist(), strict=True
        )
    ]
    sums, maxima = (over_ranks(over, each) for over, each in zip((sum, max), zip(*values, strict=True), strict=True))
    explained = [model.explain(step, sums, maxima) for model in found.models]
    for rank, (one, model) in enumerate(zip(explained, found.models, strict=True)):
        for kind in () if one is None else one.changed:
            test = model.tests[kind]
            found.events.append(Event(step=step, rank=rank, kind=kind, since=test.since, slow_by=test.slow_by))
    return explained


def over_ranks(over: Callable[[list[Any]], Any], each: Sequence[Any]) -> Any:
    """Returns what ranks give of a step, as `over` makes one of the values of all of them."""
    if not is_dataclass(each[0]):
        return over(list(each))
    return type(each[0])(**{name: over_ranks(over, [vars(one)[name] for one in each]) for name in vars(each[0])})


def expected_delay(rule: Rule, slowdown: float) -> float:
    """Returns the steps until a constant slowdown is named, as an expectation; infinite for one below half."""
    shift = (1.0 - rule.memory) * slowdown / rule.scale
    gains = [(one.threshold, min(shift, one.clip) - rule.reference) for one in rule.sums]
    return min((threshold / gain if gain > 0 else math.inf) for threshold, gain in gains)
