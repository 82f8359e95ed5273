"""The order of a run by stages: the draws of each step. Nothing else knows of stages.

A stage begins at a step and lasts until the next one. It has weights of the sources and the size of its steps, and its
steps draw by the order of a `Mixture` of the sources that have a weight: every prefix of a stage's draws is within a
pack of the ratio. Where the ratio stays, the mixture goes on, so that a change of sizes or rates alone moves no draw. A
source always gives the next pack of its own stream, whatever the stages before took of it, so
nothing is lost or repeated; one without a weight waits. Sources are numbered by their first appearance, so neither the
draws of a step nor its `order_hash` depend on later stages.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.mixture import Mixture
from evenpack.data.order.step_shape import StepShape


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the steps from a given one on draw, and how they are divided."""

    step: int
    """The first step, counted from 0."""
    weights: tuple[int, ...]
    """Weights of all sources of the run, in the order of their first appearance; 0: it is not drawn."""
    items_per_step: int
    """Packs or sequences of a step over all ranks."""
    items_per_micro_batch: int

    @property
    def ratio(self) -> tuple[int, ...]:
        """The weights without a common divisor."""
        common = math.gcd(*self.weights)
        return tuple(weight // common for weight in self.weights)

    def shaped(self, shape: StepShape) -> StepShape:
        """Returns the shape of the stage's steps; all else of it is the run's."""
        return replace(shape, items_per_step=self.items_per_step, items_per_micro_batch=self.items_per_micro_batch)


def by_name(names: Sequence[str], weights: Sequence[int]) -> list[list[str | int]]:
    """Returns the weights of the sources that have one, without a common divisor, as JSON values."""
    common = math.gcd(*weights)
    return [[name, weight // common] for name, weight in zip(names, weights, strict=True) if weight]


def of_the_order(stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages that change draws: the first, and those with another ratio or size of steps than before."""
    changed = [
        stage
        for before, stage in pairwise(stages)
        if stage.items_per_step != before.items_per_step or stage.ratio != before.ratio
    ]
    return [*stages[:1], *changed]


def changes_by_name(names: Sequence[str], stages: Sequence[Stage]) -> list[list[Any]]:
    """Returns the first step (from 1) and weights of each later stage that changes draws, and its items if others."""
    return [
        [
            stage.step + 1,
            by_name(names, stage.weights),
            *([] if stage.items_per_step == before.items_per_step else [stage.items_per_step]),
        ]
        for before, stage in pairwise(of_the_order(stages))
    ]


class Numbering:
    """Numbers what each step has several of, as many as its stage says, through all steps."""

    def __init__(self, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Takes the first step of each stage, and the size of its steps."""
        self._starts = list(starts)
        self._sizes = list(sizes)
        self._first = [0]
        for part in range(1, len(starts)):
            steps = starts[part] - starts[part - 1]
            self._first.append(self._first[-1] + steps * sizes[part - 1])

    def size(self, step: int) -> int:
        """Returns how many a step has."""
        return self._sizes[bisect_right(self._starts, step) - 1]

    def before(self, step: int) -> int:
        """Returns how many all steps before have: the number of the step's first."""
        part = bisect_right(self._starts, step) - 1
        return self._first[part] + (step - self._starts[part]) * self._sizes[part]

    def place(self, number: int) -> tuple[int, int]:
        """Returns the step of a number, and its index within the step."""
        part = bisect_right(self._first, number) - 1
        steps, index = divmod(number - self._first[part], self._sizes[part])
        return self._starts[part] + steps, index


class StagedOrder:
    """The endless order in which steps draw from sources."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Takes the stages in the order of their steps, of which the first is 0.

        Raises: ConfigError for weights that no mixture can have.
        """
        self.stages = tuple(stages)
        self._starts = [stage.step for stage in stages]
        self._draws = Numbering(self._starts, [stage.items_per_step for stage in stages])
        self._drawn = [tuple(np.flatnonzero(stage.weights).tolist()) for stage in stages]
        """The sources that each stage draws."""
        made: dict[tuple[int, ...], Mixture] = {}
        weights = [tuple(weight for weight in stage.weights if weight) for stage in stages]
        self._mixtures = [made.get(one) or made.setdefault(one, Mixture(one)) for one in weights]
        self._begun = [0] * len(stages)
        """The draw with which the mixture of each stage began: in that stage, or in one before of the same ratio."""
        self._offsets = np.zeros((len(stages), len(stages[0].weights)), dtype=np.int64)
        """How often each source was drawn before that draw."""
        for part in range(1, len(stages)):
            self._begun[part] = self._begun[part - 1]
            self._offsets[part] = self._offsets[part - 1]
            if stages[part].ratio == stages[part - 1].ratio:
                continue
            self._begun[part] = self._draws.before(self._starts[part])
            draws = self._begun[part] - self._begun[part - 1]
            for local, source in enumerate(self._drawn[part - 1]):
                self._offsets[part, source] += self._mixtures[part - 1].drawn_before(local, draws)

    def draws(self, step: int) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns (source, position in that source's own stream) of the draws of a step, counted from 0.

        The time does not depend on the step.
        """
        part = self.index_at(step)
        first = self._draws.before(step) - self._begun[part]
        local, positions = self._mixtures[part].draws(first, first + self._draws.size(step))
        sources = np.array(self._drawn[part], dtype=np.int64)[local]
        return sources, positions + self._offsets[part, sources]

    def drawn_before(self, source: int, step: int) -> int:
        """Returns how many draws of all steps before are of the source, which is its next stream position."""
        part = self.index_at(step)
        count = int(self._offsets[part, source])
        if source not in self._drawn[part]:
            return count
        draws = self._draws.before(step) - self._begun[part]
        return count + self._mixtures[part].drawn_before(self._drawn[part].index(source), draws)

    def items_before(self, step: int) -> int:
        """Returns the draws of all steps before."""
        return self._draws.before(step)

    def shares(self, steps: int, *, first: int = 0) -> tuple[Fraction, ...]:
        """Returns each source's fraction of the draws of these steps; by the weights, where there is one stage."""
        if len(self.stages) == 1:
            weights = self.stages[0].weights
            return tuple(Fraction(weight, sum(weights)) for weight in weights)
        items = self.items_before(steps) - self.items_before(first)
        sources = range(self._offsets.shape[1])
        return tuple(Fraction(self.drawn_before(one, steps) - self.drawn_before(one, first), items) for one in sources)

    def begun(self, steps: int | None) -> tuple[Stage, ...]:
        """Returns the stages that have begun after so many steps; None: all."""
        return tuple(stage for stage in self.stages if steps is None or stage.step < steps or stage.step == 0)

    def index_at(self, step: int) -> int:
        """Returns the index of the stage that a step belongs to."""
        return bisect_right(self._starts, step) - 1
