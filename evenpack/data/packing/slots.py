"""Turns strategies whose slots may be longer than their sequences into strategies that place a histogram exactly."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy


@dataclass(kw_only=True)
class _Filled:
    """A strategy's packs 0 to `count` - 1, and the length that each of its slots holds over which packs."""

    count: int
    pieces: list[list[tuple[int, int]]]
    """For each slot its pieces (first pack after the piece, length held, 0 if none), in order."""

    def exact(self) -> Counter[Strategy]:
        """Returns the exact strategies into which it divides."""
        result: Counter[Strategy] = Counter()
        ends = sorted({end for slot in self.pieces for end, _ in slot} | {self.count})
        positions = [0] * len(self.pieces)
        start = 0
        for end in ends:
            held = []
            for index, slot in enumerate(self.pieces):
                while positions[index] < len(slot) and slot[positions[index]][0] <= start:
                    positions[index] += 1
                if positions[index] < len(slot):
                    held.append(slot[positions[index]][1])
            strategy = tuple(sorted((length for length in held if length), reverse=True))
            if strategy:
                result[strategy] += end - start
            start = end
        return result


@dataclass(kw_only=True)
class _Slots:
    """One slot of some packs; packs before `used` already have a length."""

    pieces: list[tuple[int, int]]
    count: int
    used: int = field(default=0)


def place(
    strategies: Mapping[Strategy, int], histogram: LengthHistogram
) -> tuple[dict[Strategy, int], Int64[np.ndarray, " longest"]]:
    """Gives every sequence the tightest free slot, the longest sequences first.

    Unused slots become padding. Returns: exact strategies, and the counts of sequences without a slot.
    """
    filled, by_length = _lay_out(strategies)
    left_over = np.zeros_like(histogram.counts)
    free: list[_Slots] = []
    lengths = sorted({*by_length, *(np.flatnonzero(histogram.counts) + 1).tolist()}, reverse=True)
    for length in lengths:
        free += by_length.get(length, ())
        waiting = int(histogram.counts[length - 1]) if length <= len(histogram.counts) else 0
        while waiting and free:
            slots = free[-1]
            taken = min(waiting, slots.count - slots.used)
            slots.used += taken
            slots.pieces.append((slots.used, length))
            waiting -= taken
            if slots.used == slots.count:
                free.pop()
        if waiting:
            left_over[length - 1] = waiting
    exact: Counter[Strategy] = Counter()
    for one in filled:
        exact.update(one.exact())
    return dict(exact), left_over


def _lay_out(strategies: Mapping[Strategy, int]) -> tuple[Sequence[_Filled], dict[int, list[_Slots]]]:
    filled: list[_Filled] = []
    by_length: dict[int, list[_Slots]] = defaultdict(list)
    for strategy, count in strategies.items():
        one = _Filled(count=count, pieces=[[] for _ in strategy])
        filled.append(one)
        for length, pieces in zip(strategy, one.pieces, strict=True):
            by_length[length].append(_Slots(pieces=pieces, count=count))
    return filled, by_length
