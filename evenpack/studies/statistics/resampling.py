"""Resampled values whose neighbours may be correlated, and the intervals that follow."""

import itertools
import math

import numpy as np
from jaxtyping import Float64

from evenpack.studies.statistics.paired import Interval

ROUNDS = 200
"""Rounds of a bootstrap."""
CONFIDENCE = 0.95


def resampled(
    values: Float64[np.ndarray, " values"], *, rounds: int, seed: int
) -> Float64[np.ndarray, "rounds values"]:
    """Returns bootstrap samples of blocks of neighbouring steps, circularly."""
    random = np.random.default_rng([seed, 1])
    length = block_length(values)
    blocks = -(-len(values) // length)
    starts = random.integers(len(values), size=(rounds, blocks, 1))
    steps = (starts + np.arange(length)).reshape(rounds, -1)[:, : len(values)]
    return values[steps % len(values)]


def autocorrelation(values: Float64[np.ndarray, " values"], *, lag: int = 1) -> float:
    """Returns the autocorrelation of values `lag` apart."""
    centred = values - values.mean()
    return float((centred[lag:] * centred[:-lag]).sum() / (centred**2).sum())


def block_length(values: Float64[np.ndarray, " values"]) -> int:
    """Returns the block length: 1 where neighbours are not correlated; a tenth of all values at most.

    Otherwise it is the greater of Carlstein's rule, made for an autoregressive series, and twice the integrated
    autocorrelation time, 1 + 2 (sum over the lags before the first that is not above 0), which also sees slow drift.
    """
    if np.ptp(values) == 0:
        return 1
    correlation = abs(autocorrelation(values))
    longest = max(1, len(values) // 10)
    if correlation < 2.0 / math.sqrt(len(values)):
        return 1
    carlstein: float = (2.0 * correlation / (1.0 - correlation**2)) ** (2 / 3) * len(values) ** (1 / 3)
    by_lag = (autocorrelation(values, lag=lag) for lag in range(1, longest + 1))
    time = 1.0 + 2.0 * sum(itertools.takewhile(lambda share: share > 0, by_lag))
    return min(math.ceil(max(carlstein, 2.0 * time)), longest)


def interval(numbers: Float64[np.ndarray, " rounds"]) -> Interval:
    """Returns the 2.5th to the 97.5th percentile of a bootstrap, which is slightly short as an interval of 95 %.

    Over 600 synthetic series each, it holds the true mean of 50, 200 and 1,000 independent steps in 92, 93 and 94 % of
    them, and of steps whose neighbours have a correlation of 0.5 in 84, 89 and 93 %: blocks are few in a short log.
    """
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(numbers, tails, method="nearest").tolist()  # never between two infinities
    return Interval(low=low, high=high)
