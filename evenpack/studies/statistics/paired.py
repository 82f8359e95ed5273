"""Spreads, intervals and differences of pairs of measurements, and whether these are within a margin fixed beforehand.

Two one-sided tests at significance s reject "the difference is as large as the margin" exactly where the interval of
confidence 1 - 2s is within the margin (Schuirmann 1987). Intervals are Student's, of the mean difference.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Verdict = Literal["equivalent", "worse", "better", "undecided", "no verdict"]
"""No verdict: within a margin of which no control has shown that it can be exceeded."""

FamilyVerdict = Literal["higher", "lower", "no effect", "cannot tell"]
"""What one of several comparisons says, corrected for their number."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range that holds a number with a stated confidence. `format` writes both ends: `0.52 to 0.61`."""

    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.low:{form}} to {self.high:{form}}"


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A value and its interval. `format` writes both: `0.61 (0.47 to 0.71)`."""

    value: float
    interval: Interval

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} ({self.interval:{form}})"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The mean and deviation of one number over seeds. `format` writes both: `2.31 ± 0.02`."""

    mean: float
    deviation: float | None
    """Deviation; None for a single seed, and if a value is infinite."""

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        has_deviation = len(values) > 1 and all(map(math.isfinite, values))
        return Spread(mean=statistics.fmean(values), deviation=statistics.stdev(values) if has_deviation else None)

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}}" + ("" if self.deviation is None else f" ± {self.deviation:{form}}")


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The mean difference of pairs, and its interval of confidence 1 - 2 x significance."""

    mean: float
    standard_deviation: float | None
    """Deviation of the single differences; None for a single pair, as are the ends."""
    low: float | None
    high: float | None
    pairs: int

    @property
    def p_value(self) -> float | None:
        """The p-value of Student's two-sided test that the mean is 0; None for a single pair."""
        if self.standard_deviation is None:
            return None
        if self.standard_deviation == 0.0:
            return float(self.mean == 0.0)
        statistic = self.mean / self.standard_deviation * math.sqrt(self.pairs)
        return float(2.0 * stats.t.sf(abs(statistic), self.pairs - 1))

    @property
    def interval(self) -> Interval | None:
        """Both ends; None for a single pair."""
        return None if self.low is None or self.high is None else Interval(low=self.low, high=self.high)


def paired_difference(values: Sequence[float], reference: Sequence[float], *, significance: float) -> PairedDifference:
    """Returns `values` - `reference`, item by item. Raises: ValueError without a pair, or if their numbers differ."""
    differences = np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    if not len(differences):
        raise ValueError("there is no pair to compare")
    mean, pairs = float(differences.mean()), len(differences)
    if pairs == 1:
        return PairedDifference(mean=mean, standard_deviation=None, low=None, high=None, pairs=1)
    deviation = float(differences.std(ddof=1))
    reach = float(stats.t.ppf(1.0 - significance, pairs - 1)) * deviation / math.sqrt(pairs)
    return PairedDifference(mean=mean, standard_deviation=deviation, low=mean - reach, high=mean + reach, pairs=pairs)


def verdict_of(difference: PairedDifference, *, margin: float, larger_is_worse: bool) -> Verdict:
    """Returns equivalent: the interval is within the margin; worse, better: beyond it; undecided: it crosses it."""
    low, high = difference.low, difference.high
    if low is None or high is None:
        return "undecided"
    if -margin < low and high < margin:
        return "equivalent"
    if low >= margin:
        return "worse" if larger_is_worse else "better"
    if high <= -margin:
        return "better" if larger_is_worse else "worse"
    return "undecided"


def verdicts_of_family(
    differences: Sequence[PairedDifference], *, effects: Sequence[float], significance: float
) -> list[FamilyVerdict]:
    """Returns a verdict for each comparison of one table, corrected for their number by Holm's procedure.

    higher, lower: the difference is significant among all of them, by two-sided tests; the probability that any of
    them errs is at most `significance`. no effect: the interval is within the one of `effects`, the smallest
    differences that matter, one for each comparison. cannot tell: neither.
    """
    known = [(one.p_value, index) for index, one in enumerate(differences) if one.p_value is not None]
    verdicts: list[FamilyVerdict] = ["cannot tell"] * len(differences)
    is_open = True  # Holm: after the first that is not rejected none is
    for rank, (p_value, index) in enumerate(sorted(known)):
        difference = differences[index]
        is_open = is_open and p_value <= significance / (len(differences) - rank)
        if is_open:
            verdicts[index] = "higher" if difference.mean > 0 else "lower"
        elif difference.low is not None and difference.high is not None:
            is_within = -effects[index] < difference.low and difference.high < effects[index]
            verdicts[index] = "no effect" if is_within else "cannot tell"
    return verdicts
