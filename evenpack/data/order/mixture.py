"""The source of each draw: a fixed periodic order, never more than a pack away from the ratio of the weights."""

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from jaxtyping import Int64

from evenpack.errors import ConfigError

_LONGEST_PERIOD = 1 << 22
"""Longest period in draws; it is kept in memory (24 bytes per draw) and takes about 0.3 µs per draw to compute."""


class Mixture:
    """The endless order in which sources are drawn, for integer weights.

    After n draws in all, for every n, each of k sources was drawn n x weight / (sum of weights) times, up to
    1 - 1 / (2k - 2) of a draw. The order repeats after (sum of weights) draws, common divisors removed.

    Source: Tijdeman, "The chairman assignment problem" (1980). The bound gives the j-th draw of a source a window of
    positions; of the sources whose window is open, the one whose window closes first is drawn. Drawing the source with
    the largest deficit instead can miss by more than one draw (by 1.35 for weights 1, 5 and 25, five sources each).
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Checks the weights. Raises: ConfigError for a weight below 1, no weight, or a period above 2**22 draws."""
        wrong = [index for index, weight in enumerate(weights) if weight < 1]
        if wrong or not weights:
            found = f"weight {weights[wrong[0]]} for source {wrong[0]}" if wrong else "no source"
            raise ConfigError(f"a mixture needs sources with weights of 1 or more, found {found}")
        divisor = math.gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.period = sum(self.weights)
        if self.period > _LONGEST_PERIOD:
            raise ConfigError(
                f"the weights {tuple(weights)} repeat only after {self.period} draws, at most {_LONGEST_PERIOD} are "
                "possible; choose rounder weights"
            )
        self.order: Int64[np.ndarray, " period"] = _chairman_order(self.weights)
        self._places = np.argsort(self.order, kind="stable")
        """Positions of the draws within the period, the first source's first."""
        self._first_places = np.cumsum(self.weights) - self.weights
        self._earlier_draws = np.empty(self.period, dtype=np.int64)
        """How often the source at each position was drawn earlier in the period."""
        self._earlier_draws[self._places] = np.arange(self.period) - np.repeat(self._first_places, self.weights)

    def draws(self, start: int, stop: int) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns (source, position in that source's own stream) of the draws from `start` up to `stop`.

        The time does not depend on the start.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"expected 0 <= start <= stop, found start {start} and stop {stop}")
        periods, places = np.divmod(np.arange(start, stop, dtype=np.int64), self.period)
        sources = self.order[places]
        positions = periods * np.array(self.weights, dtype=np.int64)[sources] + self._earlier_draws[places]
        return sources, positions

    def drawn_before(self, source: int, stop: int) -> int:
        """Returns how many of the draws from 0 up to `stop` are of the source, which is its next stream position."""
        periods, rest = divmod(stop, self.period)
        first = int(self._first_places[source])
        of_source = self._places[first : first + self.weights[source]]
        return periods * self.weights[source] + int(np.searchsorted(of_source, rest))


def _chairman_order(weights: tuple[int, ...]) -> Int64[np.ndarray, " period"]:
    """Returns one period of Tijdeman's order: each draw by earliest deadline among those released."""
    period, sources = sum(weights), len(weights)
    if sources == 1:
        return np.zeros(period, dtype=np.int64)
    windows = [_windows(weight, period, sources) for weight in weights]
    releases = np.concatenate([release for release, _ in windows])
    deadlines = np.concatenate([deadline for _, deadline in windows])
    owners = np.repeat(np.arange(sources), weights)
    # One integer orders by deadline, then by source, and contains the source.
    urgencies = deadlines * sources + owners
    by_release = np.argsort(releases, kind="stable")
    released = np.searchsorted(releases[by_release], np.arange(period), side="right").tolist()
    waiting = urgencies[by_release].tolist()
    order = np.empty(period, dtype=np.int64)
    heap: list[int] = []
    begin = 0
    for draw, end in enumerate(released):
        for urgency in waiting[begin:end]:
            heappush(heap, urgency)
        begin = end
        order[draw] = heappop(heap) % sources
    return order


def _windows(
    weight: int, period: int, sources: int
) -> tuple[Int64[np.ndarray, " weight"], Int64[np.ndarray, " weight"]]:
    """Returns the first and last position (from 0) for each draw of one source in a period.

    With share = weight / period and slack = 1 / (2 sources - 2), draw j (from 1) is at the earliest draw t of all
    with t x share >= j - 1 + slack, and no later than (t - 1) x share <= j - slack allows.
    """
    unit = 2 * sources - 2  # all in integers: both sides times unit x period
    draws = np.arange(1, weight + 1, dtype=np.int64)
    releases = -(-period * (unit * (draws - 1) + 1) // (unit * weight)) - 1
    deadlines = period * (unit * draws - 1) // (unit * weight)
    return releases, deadlines
