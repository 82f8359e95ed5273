"""The best pack at given prices: a knapsack over lengths, solved for every number of slots together."""

from dataclasses import dataclass
from random import Random

import numpy as np
from jaxtyping import Num

from evenpack.data.packing.certificate import Certificate
from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy

_FORBIDDEN = -(1 << 60)
"""Price of a length that does not occur; far below every sum of prices."""

_SCALE = float(1 << 36)
"""Scale of the integer prices: duals are at most 1, so that sums over a pack stay far inside 64 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BestPacks:
    """The greatest sum of prices for each room of 0 to `pack_length` slots and each number of sequences.

    If no limit binds, there is one layer only, which refers to itself.
    """

    prices: Num[np.ndarray, " pack_length"]
    """Prices, far below 0 where a length does not occur."""
    values: Num[np.ndarray, "layers rooms"]
    """Layers of sums: `values[d]` allows d + 1 sequences."""
    unlimited: bool

    @property
    def value(self) -> float:
        """The value of a whole pack."""
        return float(self.values[-1, -1])

    def values_with(self) -> Num[np.ndarray, " pack_length"]:
        """Returns the greatest value of a pack that holds each length; index i is length i + 1."""
        beside = self._allowing(len(self.values) - 1)
        return np.asarray(self.prices + beside[-2::-1])

    def near_best(self, first: int, tolerance: float, random: Random) -> Strategy:
        """Returns a pack with a sequence of length `first`, worth at most `tolerance` less than the best such pack.

        Each step takes any one of the lengths that stay within the remaining tolerance.
        """
        strategy = [first]
        room = len(self.prices) - first
        layer = len(self.values) - 1
        while room > 0 and (self.unlimited or layer > 0):
            layer -= not self.unlimited
            losses = self.values[layer, room] - self._sums(layer, room)
            near = np.flatnonzero(losses <= tolerance)
            if len(near):
                index = int(near[int(random.random() * len(near))])
                tolerance = max(tolerance - float(losses[index]), 0)
                strategy.append(index + 1)
                room -= index + 1
            elif self.unlimited:
                room -= 1
        return tuple(sorted(strategy, reverse=True))

    def _sums(self, layer: int, room: int) -> Num[np.ndarray, " room"]:
        """Returns, for each length that fits, its price plus the best value of the remaining slots."""
        return np.asarray(self.prices[:room] + self._allowing(layer)[room - 1 :: -1])

    def _allowing(self, sequences: int) -> Num[np.ndarray, " rooms"]:
        """Returns the greatest sums for so many sequences; for any number where there is no limit."""
        if self.unlimited or sequences:
            return np.asarray(self.values[0 if self.unlimited else sequences - 1])
        return np.zeros_like(self.values[0])


def best_packs(
    prices: Num[np.ndarray, " pack_length"], histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> BestPacks:
    """Solves the knapsack in O(pack_length² x layers), exactly if `prices` (index i: length i + 1) are integers."""
    occurs = np.zeros(pack_length, dtype=bool)
    occurs[: histogram.longest] = histogram.counts[: histogram.longest] > 0
    allowed = np.where(occurs, prices, np.array(_FORBIDDEN, dtype=prices.dtype))
    unlimited = max_sequences_per_pack >= pack_length // histogram.shortest
    values = np.zeros((1 if unlimited else max_sequences_per_pack, pack_length + 1), dtype=prices.dtype)
    below = np.zeros(pack_length + 1, dtype=prices.dtype)
    for here in values:
        base = here if unlimited else below
        for room in range(1, pack_length + 1):
            without = here[room - 1] if unlimited else below[room]
            here[room] = max(without, (allowed[:room] + base[room - 1 :: -1]).max())
        below = here
    return BestPacks(prices=allowed, values=values, unlimited=unlimited)


def prove(
    duals: Num[np.ndarray, " pack_length"], histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Certificate:
    """Rounds the duals of a linear program down to integers and solves the knapsack over them exactly."""
    prices = np.floor(np.clip(duals, 0, 1) * _SCALE).astype(np.int64)
    best = best_packs(prices, histogram, pack_length, max_sequences_per_pack)
    return Certificate(prices=prices, pack_value=max(int(best.values[-1, -1]), 1))
