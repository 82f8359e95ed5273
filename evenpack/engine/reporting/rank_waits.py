"""Why ranks wait: a model of their seconds, fitted while the run goes on, and a test that names a rank that is slow.

In a step, rank r has a planned cost c (known before the step), its device works for w seconds, its passes take y
seconds, and it has waited l seconds for its batch. In seconds of work,

    p = fixed + per_cost * c     what the mean rank would need, by least squares over all ranks and recent steps
    q = p * (1 + slowness)       what this rank needs, by its own recent steps

and s, the seconds of this step over what was expected of it, takes both to seconds of the clock. A rank waits until the
last one arrives. What is known first is charged first, and the parts add up to the wait:

    plan       s * (max p - p)                            by the plan alone
    machine    s * (max q - q)  -  the part above         with the slowness of each rank, from the steps before
    noise      max y - y        -  the parts above        whatever else this step had
    loader     max (y + l) - max y                        by waiting for batches, the same for all ranks

No rank sends what it measures to the others: sums and maxima are enough, which the step's reduction has anyway. So
each rank judges itself, and the cost does not depend on their number.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64

WARM_UP_STEPS = 10
"""First steps of a start, of which nothing is learned: kernels are chosen and memory is reserved in them."""
FIT_STEPS = 20
"""Steps after these, from which cost and seconds are fitted before any wait is split."""
LEARNING_STEPS = 200
"""Steps after these, from which a rank learns how it varies while it is healthy; then it is judged."""
SLOWDOWN = 0.05
"""Smallest slowdown to be named, as a share of what the others need; larger where a rank varies more."""
FALSE_ALARM_PROBABILITY = 0.01
"""Bound of the probability that any healthy rank is named in the whole run."""

_FIT_MEMORY_STEPS = 500
_TRACKING_STEPS = 20
"""Steps over which a rank's slowness is a mean."""
_RESOLVED = 8.0
"""A slowdown that can be named is so many standard errors of the mean over the learning steps: half of it is 4."""
_CLIP = 3.0
_BATCH = 10
"""Steps in a row whose mean shows what single steps do not: noise that lasts."""
_REACHES = ((_CLIP, 3.0), (6.0, 12.0))
"""Where values are clipped, in standard deviations and in half slowdowns: the larger of the two. The first clip finds a
constant slowdown soonest; the second one rare steps that are very slow, which count for little in the first."""
_FINEST = SLOWDOWN / 20
"""Least standard deviation with which a rank is judged; times that vary less are no better known."""
_MOST_MEMORY = 0.9

Kind = Literal["compute", "loader"]
"""In what a rank can be slow: its forward and backward passes, or the wait for its batches."""


@dataclass(frozen=True, kw_only=True)
class Cusum:
    """Page's cumulative sum of values that are clipped at `clip`, compared with `threshold`."""

    clip: float
    centre: float
    """Mean of the clipped values of healthy steps."""
    threshold: float

    @classmethod
    def learn(
        cls, values: Float64[np.ndarray, " steps"], *, clip: float, reference: float, probability: float
    ) -> "Cusum":
        """Learns from the values of healthy steps.

        A clipped value X of a healthy step has the mean 0 given the steps before, a variance of at most v, and is at
        most c. So E exp(t (X - reference)) <= 1 for the root t of (v / c²)(exp(tc) - 1 - tc) = t * reference, by
        Bennett's inequality. The sum of exp(t * (sum of X - reference from step k on)) over all k is then at most the
        number of steps, as an expectation, and by Doob's inequality it exceeds exp(th) in any of N steps with a
        probability of at most N exp(-th); wherever the CUSUM exceeds h, it does (the e-detectors of Shin, Ramdas and
        Rinaldo, 2022, of which this is one).

        Args:
            reference: what is taken off in each step.
            probability: bound of the probability of a false alarm, for each step of the run.
        """
        clipped = np.clip(values, -clip, clip)
        # As if one step more had been at the bound, which so few steps may have missed.
        rate = _bennett(reference, clip, _lasting_variance(clipped) + clip**2 / len(values))
        return cls(clip=clip, centre=float(clipped.mean()), threshold=-math.log(probability) / rate)

    def value(self, news: float) -> float:
        """Returns the value of a step that adds to the sum."""
        return min(max(news, -self.clip), self.clip) - self.centre


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a rank is judged, learned from its own healthy steps.

    The excess of a step over what the others need is compared with `baseline`; what follows from the step before it, by
    `memory`, is taken off, because steps in a row are alike. The rest, in units of `scale`, goes into both sums, less
    `reference`, which is half the slowdown to be named.
    """

    baseline: float
    memory: float
    scale: float
    """Standard deviation of what is left of a healthy step."""
    reference: float
    sums: tuple[Cusum, Cusum]
    slowdown: float
    """Smallest slowdown that is named, as a share."""

    @classmethod
    def learn(cls, excesses: Float64[np.ndarray, " steps"], *, per_step: float) -> "Rule":
        """Learns from healthy steps.

        Args:
            per_step: bound of the probability that this rank is named while it is healthy, for each step of the run.
        """
        steps = len(excesses)
        mean = _robust_mean(excesses)
        reach = _CLIP * _spread(excesses)
        centred = np.clip(excesses - mean, -reach, reach)
        variance = float(centred @ centred)
        memory = min(max(float(centred[1:] @ centred[:-1]) / variance, 0.0), _MOST_MEMORY) if variance else 0.0
        news = (excesses[1:] - mean) - memory * (excesses[:-1] - mean)
        scale = max(_spread(news), _FINEST)
        error = scale * math.sqrt(_lasting_variance(np.clip(news / scale, -_CLIP, _CLIP)) / steps) / (1.0 - memory)
        slowdown = max(SLOWDOWN, _RESOLVED * error)
        reference = (1.0 - memory) * slowdown / (2.0 * scale)
        fast, wide = (
            Cusum.learn(
                news / scale,
                clip=max(deviations, halves * reference),
                reference=reference,
                probability=per_step / len(_REACHES),
            )
            for deviations, halves in _REACHES
        )
        return cls(
            # Below 0 it would be another rank's slowness in these steps, and this one's when that one is well again.
            baseline=min(max(mean, 0.0), slowdown / 2),
            memory=memory,
            scale=scale,
            reference=reference,
            sums=(fast, wide),
            slowdown=slowdown,
        )


class SlowTest:
    """Judges one rank in one kind, step by step."""

    def __init__(self, *, per_step: float) -> None:
        """`per_step` is that of `Rule.learn`."""
        self._per_step = per_step
        self._learning: list[float] = []
        self._before = self._back = self._excess = 0.0
        self._sums = [0.0, 0.0]
        self._onset = self._steps = 0
        self.rule: Rule | None = None
        """None while it is learned."""
        self.since: int | None = None
        """The step since which the rank is slow; None if it is not."""
        self.slow_by: float | None = None
        """The mean slowdown since then, as a share of what the others need; None if it is not slow. Steps after which
        nothing but healthy ones have come so far are left out: they may be its recovery."""

    def observe(self, step: int, excess: float) -> bool:
        """Takes the excess of a step as a share; returns whether the rank has just become slow, or well again."""
        rule = self.rule
        if rule is None:
            self._learning.append(excess)
            if len(self._learning) == LEARNING_STEPS:
                self.rule = Rule.learn(np.array(self._learning), per_step=self._per_step)
                self._before = excess - self.rule.baseline
            return False
        above = excess - rule.baseline
        news, self._before = (above - rule.memory * self._before) / rule.scale, above
        fast, wide = rule.sums
        if not any(self._sums):
            self._onset, self._excess, self._steps = step, 0.0, 0
        self._excess, self._steps = self._excess + excess, self._steps + 1
        if self.since is None:
            gains = (fast.value(news), wide.value(news))
            self._sums = [max(0.0, sum_ + gain - rule.reference) for sum_, gain in zip(self._sums, gains, strict=True)]
            is_changed = self._sums[0] >= fast.threshold or self._sums[1] >= wide.threshold
            if is_changed:
                self.since, self._back, self.slow_by = self._onset, 0.0, self._excess / self._steps
            return is_changed
        self._back = max(0.0, self._back + rule.reference - wide.value(news))
        if self._back == 0.0:
            self.slow_by = self._excess / self._steps
        is_changed = self._back >= fast.threshold
        if is_changed:
            self.since, self.slow_by, self._sums = None, None, [0.0, 0.0]
        return is_changed


class CostFit:
    """Seconds of work by planned cost: a line, by least squares over all ranks and the last hundreds of steps."""

    def __init__(self) -> None:
        self.steps, self._moments = 0, np.zeros(4)

    def add(self, *moments: float) -> None:
        """Adds the means over the ranks of cost, cost², seconds and cost times seconds."""
        self.steps += 1
        self._moments += max(1.0 / self.steps, 1.0 / _FIT_MEMORY_STEPS) * (np.array(moments) - self._moments)

    def line(self) -> tuple[float, float]:
        """Returns the fixed seconds, and the seconds for each unit of cost; neither is negative."""
        cost, squares, seconds, products = self._moments.tolist()
        variance = squares - cost**2
        if cost <= 0.0 or variance <= 1e-12 * cost**2:
            return seconds, 0.0
        slope = min(max((products - cost * seconds) / variance, 0.0), seconds / cost)
        return seconds - slope * cost, slope


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds that were waited in a step, by cause."""

    plan: float
    machine: float
    noise: float
    loader: float

    @classmethod
    def between(cls, last: "Arrival", rank: "Arrival", *, per_work_second: float) -> "Waits":
        """Splits the wait of a rank, or of the mean one, for the last one."""
        plan = per_work_second * (last.planned - rank.planned)
        expected = per_work_second * (last.expected - rank.expected)
        return cls(
            plan=plan,
            machine=expected - plan,
            noise=last.compute - rank.compute - expected,
            loader=last.arrival - last.compute,
        )


@dataclass(frozen=True, kw_only=True)
class ExplainedStep:
    """The waits of a step."""

    mean: Waits
    """Of the mean rank, the same on all ranks."""
    own: Waits
    """Of this rank."""
    slow_ranks: int
    """Ranks that are named as slow, by the steps before."""
    waited_for: float
    """Seconds that all others together waited for this rank; 0 if it was not the last to arrive."""
    changed: tuple[Kind, ...]
    """In what this rank has just become slow, or well again."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What is planned, expected and measured of a rank, in seconds; over ranks their sums, means, or the largest."""

    planned: float
    expected: float
    compute: float
    arrival: float


@dataclass(frozen=True, kw_only=True)
class WaitSums:
    """What a rank adds to the model of all ranks in a step; over all ranks, the sums."""

    cost: float
    """Planned cost of its work."""
    cost_squares: float
    steady: float
    cost_steady: float
    work: float
    """Seconds for which its device was at work."""
    arrival: Arrival
    slow: int
    """1 for a rank that is named as slow, by the steps before."""


WaitValues = tuple[WaitSums, Arrival]


class WaitModel:
    """The model on one rank of several. Each step calls `own_values`, the step's reduction, and `explain`."""

    own: WaitSums
    """What this rank has added to the last step."""

    def __init__(self, *, rank_count: int, planned_steps: int) -> None:
        self._ranks = rank_count
        per_step = FALSE_ALARM_PROBABILITY / (rank_count * max(planned_steps, 1) * 2)
        self.tests: dict[Kind, SlowTest] = {kind: SlowTest(per_step=per_step) for kind in get_args(Kind)}
        self._fit = CostFit()
        self._seen = 0
        self.slowness = 0.0
        """Share by which this rank needs longer than the mean one for the same work, over its last steps."""
        self._spread = 0.0

    def own_values(self, *, cost: float, work: float, compute: float, loader: float) -> WaitValues:
        """Takes this rank's values of a step, and returns what is reduced.

        Args:
            cost: the planned cost.
            work: seconds for which the device was at work.
            compute: seconds of forward and backward passes by the clock.
            loader: seconds for which it waited for the batches before them.
        """
        fixed, slope = self._fit.line()
        planned = fixed + slope * cost
        steady = work / (1.0 + self.slowness)
        if self._is_fitted:  # a single step that stalls does not bend the line
            reach = max(4.0 * self._spread, 0.2)
            steady = min(max(steady, planned * (1.0 - reach)), planned * (1.0 + reach))
        expected = planned * (1.0 + self.slowness)
        self.own = WaitSums(
            cost=cost,
            cost_squares=cost**2,
            steady=steady,
            cost_steady=cost * steady,
            work=work,
            arrival=Arrival(planned=planned, expected=expected, compute=compute, arrival=compute + loader),
            slow=int(any(test.since is not None for test in self.tests.values())),
        )
        return self.own, self.own.arrival

    def explain(self, step: int, sums: WaitSums, last: Arrival) -> ExplainedStep | None:
        """Takes what `own_values` gave, over all ranks; returns the waits, None if they are not split.

        They are split from step WARM_UP_STEPS + FIT_STEPS + 1 of a start on.
        """
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return None
        explained = self._explained(step, sums, last) if self._is_fitted else None
        self._fit.add(*(one / self._ranks for one in (sums.cost, sums.cost_squares, sums.steady, sums.cost_steady)))
        return explained

    @property
    def _is_fitted(self) -> bool:
        return self._fit.steps >= FIT_STEPS

    def _explained(self, step: int, sums: WaitSums, last: Arrival) -> ExplainedStep:
        ranks, work, own, of_all = self._ranks, self.own.work, self.own.arrival, sums.arrival
        mean = Arrival(**{name: value / ranks for name, value in vars(of_all).items()})
        per_work_second = mean.compute / mean.expected
        self._track(work / own.planned / (sums.work / of_all.planned) - 1.0)
        others = (sums.work - work) / (of_all.planned - own.planned)
        late = (own.arrival - own.compute) - (mean.arrival - mean.compute)
        excesses: dict[Kind, float] = {
            "compute": work / own.planned / others - 1.0,
            "loader": late * ranks / (ranks - 1) / mean.compute,
        }
        return ExplainedStep(
            mean=Waits.between(last, mean, per_work_second=per_work_second),
            own=Waits.between(last, own, per_work_second=per_work_second),
            slow_ranks=sums.slow,
            waited_for=ranks * (last.arrival - mean.arrival) if own.arrival >= last.arrival else 0.0,
            changed=tuple(kind for kind, excess in excesses.items() if self.tests[kind].observe(step, excess)),
        )

    def _track(self, excess: float) -> None:
        tracked = self._fit.steps - FIT_STEPS + 1
        error = excess - self.slowness
        reach = math.inf if tracked <= _TRACKING_STEPS else 4.0 * self._spread
        gain = max(1.0 / tracked, 1.0 / _TRACKING_STEPS)
        self.slowness += gain * min(max(error, -reach), reach)
        self._spread += gain * (1.2533 * abs(error) - self._spread)  # of a normal law, its standard deviation


def _robust_mean(values: Float64[np.ndarray, " n"]) -> float:
    """Returns Huber's mean: values further than three spreads from it count as if they were there."""
    spread, mean = _spread(values), float(np.median(values))
    for _ in range(20):
        mean = float(np.clip(values, mean - _CLIP * spread, mean + _CLIP * spread).mean())
    return mean


def _spread(values: Float64[np.ndarray, " n"]) -> float:
    """Returns the standard deviation by the median absolute deviation, which outliers do not change."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _lasting_variance(values: Float64[np.ndarray, " n"]) -> float:
    """Returns the variance of single steps, or ten times that of means of ten, which is larger where noise lasts."""
    batches = values[: len(values) // _BATCH * _BATCH].reshape(-1, _BATCH).mean(axis=1)
    return max(float(values.var()), _BATCH * float(batches.var(ddof=1)))


def _bennett(reference: float, clip: float, variance: float) -> float:
    """Returns the positive root t of (variance / clip²)(exp(t clip) - 1 - t clip) = t reference."""
    factor = reference * clip / variance
    root = 10.0 + factor
    for _ in range(200):  # falls to the root, because the logarithm is concave
        root = math.log1p((1.0 + factor) * root)
    return root / clip
