"""Turns strategies whose slots may be longer than their sequences into strategies that place a histogram exactly."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from jaxtyping import Int64

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy


@dataclass(kw_only=True)
class _Slots:
    """One slot of some packs of a strategy, and the lengths that it holds over which of them."""

    packs: int
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """Pieces (first pack after the piece, length held), in order; the packs after the last one hold nothing there."""

    @property
    def used(self) -> int:
        """Number of packs that have a length already."""
        return self.pieces[-1][0] if self.pieces else 0


def place(
    strategies: Mapping[Strategy, int], histogram: LengthHistogram
) -> tuple[dict[Strategy, int], Int64[np.ndarray, " longest"]]:
    """Gives every sequence the tightest free slot, the longest sequences first.

    Unused slots become padding. Returns: exact strategies, and the counts of sequences without a slot.
    """
    slots_of = {strategy: [_Slots(packs=count) for _ in strategy] for strategy, count in strategies.items()}
    by_length: dict[int, list[_Slots]] = defaultdict(list)
    for strategy, slots in slots_of.items():
        for length, slot in zip(strategy, slots, strict=True):
            by_length[length].append(slot)
    left_over = np.zeros_like(histogram.counts)
    free: list[_Slots] = []
    for length in sorted({*by_length, *(np.flatnonzero(histogram.counts) + 1).tolist()}, reverse=True):
        free += by_length.get(length, ())
        waiting = int(histogram.counts[length - 1]) if length <= len(histogram.counts) else 0
        while waiting and free:
            slot = free[-1]
            taken = min(waiting, slot.packs - slot.used)
            slot.pieces.append((slot.used + taken, length))
            waiting -= taken
            if slot.used == slot.packs:
                free.pop()
        if waiting:
            left_over[length - 1] = waiting
    exact: Counter[Strategy] = Counter()
    for slots in slots_of.values():
        exact.update(_exact(slots))
    return dict(exact), left_over


def _exact(slots: Sequence[_Slots]) -> Counter[Strategy]:
    """Returns the exact strategies into which the packs of a strategy divide, where a slot changes what it holds."""
    result: Counter[Strategy] = Counter()
    start = 0
    for end in sorted({end for slot in slots for end, _ in slot.pieces}):
        places = [bisect_right(slot.pieces, start, key=itemgetter(0)) for slot in slots]
        held = [slot.pieces[place][1] for slot, place in zip(slots, places, strict=True) if place < len(slot.pieces)]
        result[tuple(sorted(held, reverse=True))] += end - start
        start = end
    return result
