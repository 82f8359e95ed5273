"""The best pack at given prices: a knapsack over lengths, solved for every room at once."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Num

from evenpack.data.packing.certificate import Certificate
from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy

_FORBIDDEN = -(1 << 60)
"""Price of a length that does not occur; far below every sum of prices."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BestPacks:
    """For each room of 0 to `pack_length` slots and each number of sequences, the greatest sum of prices.

    Without a limit that binds there is one layer only, which reaches back to itself.
    """

    values: Num[np.ndarray, "layers rooms"]
    """`values[d]` allows d + 1 sequences."""
    choices: Int64[np.ndarray, "layers rooms"]
    """The length taken last, 0 where one more slot or sequence gains nothing."""
    unlimited: bool

    @property
    def value(self) -> float:
        """Of a whole pack; an integer of up to 2**53 is exact."""
        return float(self.values[-1, -1])

    def completions(self) -> Num[np.ndarray, " rooms"]:
        """The greatest sum of prices for what a pack can hold beside a first sequence."""
        if self.unlimited or len(self.values) > 1:
            return np.asarray(self.values[0 if self.unlimited else -2])
        return np.zeros_like(self.values[0])

    def complete(self, first: int) -> Strategy:
        """The best pack that holds a sequence of length `first`."""
        room = self.values.shape[1] - 1 - first
        layer = 0 if self.unlimited else len(self.values) - 2
        strategy = [first]
        while room > 0 and layer >= 0:
            length = int(self.choices[layer, room])
            if length:
                strategy.append(length)
                room -= length
            elif self.unlimited:
                room -= 1
            layer -= not self.unlimited
        return tuple(sorted(strategy, reverse=True))


def best_packs(
    prices: Num[np.ndarray, " pack_length"], histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> BestPacks:
    """Solves the knapsack in O(pack_length² x layers), exactly if `prices` (index i: length i + 1) are integers."""
    occurs = np.zeros(pack_length, dtype=bool)
    occurs[: histogram.longest] = histogram.counts[: histogram.longest] > 0
    allowed = np.where(occurs, prices, np.array(_FORBIDDEN, dtype=prices.dtype))
    unlimited = not histogram.fills_deeper_than(max_sequences_per_pack, pack_length)
    layers = 1 if unlimited else max_sequences_per_pack
    values = np.zeros((layers, pack_length + 1), dtype=prices.dtype)
    choices = np.zeros((layers, pack_length + 1), dtype=np.int64)
    below = np.zeros(pack_length + 1, dtype=prices.dtype)
    for layer in range(layers):
        here, chosen = values[layer], choices[layer]
        for room in range(1, pack_length + 1):
            base = here if unlimited else below
            sums = allowed[:room] + base[room - 1 :: -1]
            best = int(sums.argmax())
            without = here[room - 1] if unlimited else below[room]
            if sums[best] > without:
                here[room], chosen[room] = sums[best], best + 1
            else:
                here[room] = without
        below = here
    return BestPacks(values=values, choices=choices, unlimited=unlimited)


def prove(
    duals: Num[np.ndarray, " pack_length"], histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Certificate:
    """Rounds the duals of a linear program down to integers and solves the knapsack over them exactly."""
    prices = np.floor(np.clip(duals, 0, 1) * _SCALE).astype(np.int64)
    best = best_packs(prices, histogram, pack_length, max_sequences_per_pack)
    return Certificate(prices=prices, pack_value=max(int(best.value), 1))


_SCALE = float(1 << 36)
"""Duals are at most 1, so that sums over a pack stay far inside 64 bits."""
