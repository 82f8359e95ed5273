"""Greedy histogram packing: each length, from the longest down, goes into open packs, the fullest or the emptiest.

Longest-pack-first is best fit decreasing that splits the count of a length, and shortest-pack-first worst fit
decreasing.

Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), section 3.1.1 and appendix R.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import chain

import numpy as np

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy


class OpenStrategies:
    """Strategies with their counts; those that can take another sequence are stacked by free slots, the newest on top.

    `room` is the number of free slots of a pack. The rooms that occur are kept in order, so that the smallest or
    greatest one is found by bisection where the published listings scan all rooms.
    """

    def __init__(self, pack_length: int, max_sequences_per_pack: int) -> None:
        self._pack_length = pack_length
        self._max_sequences = max_sequences_per_pack
        self._stacks: dict[int, list[tuple[Strategy, int]]] = {}
        self._rooms: list[int] = []
        self._closed: list[tuple[Strategy, int]] = []

    def add(self, strategy: Strategy, count: int) -> None:
        """Adds `count` packs; they are closed if they are full or hold the most sequences allowed."""
        room = self._pack_length - sum(strategy)
        if room == 0 or len(strategy) == self._max_sequences:
            self._closed.append((strategy, count))
            return
        if room not in self._stacks:
            self._stacks[room] = []
            insort(self._rooms, room)
        self._stacks[room].append((strategy, count))

    def take(self, room: int) -> tuple[Strategy, int]:
        """Removes the newest strategy that has exactly this room, with all its packs."""
        stack = self._stacks[room]
        strategy, count = stack.pop()
        if not stack:
            del self._stacks[room]
            del self._rooms[bisect_left(self._rooms, room)]
        return strategy, count

    def smallest_room(self, length: int) -> int | None:
        """Returns the smallest room into which `length` fits, None if it fits nowhere."""
        place = bisect_left(self._rooms, length)
        return self._rooms[place] if place < len(self._rooms) else None

    def greatest_room(self, length: int) -> int | None:
        """Returns the greatest room, None if `length` does not fit into it."""
        return self._rooms[-1] if self._rooms and self._rooms[-1] >= length else None

    def counts(self) -> dict[Strategy, int]:
        """Returns all strategies, open and closed. None occurs twice, as lengths come in once each and descend."""
        return dict(chain(self._closed, *self._stacks.values()))


def longest_pack_first(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Mapping[Strategy, int]:
    """Puts each length, from the longest down, into the fullest open packs in which it fits (LPFHP).

    A pack takes as many sequences of the length at once as fit, so that 256 is packed as [256, 256] into 512 slots and
    not left open for shorter sequences.
    """
    packs = OpenStrategies(pack_length, max_sequences_per_pack)
    for index in np.flatnonzero(histogram.counts)[::-1].tolist():
        length, waiting = index + 1, int(histogram.counts[index])
        while waiting:
            room = packs.smallest_room(length)
            if room is None:
                repeats = min(pack_length // length, max_sequences_per_pack, waiting)
                packs.add((length,) * repeats, waiting // repeats)
                waiting %= repeats
                continue
            strategy, count = packs.take(room)
            repeats = min(room // length, max_sequences_per_pack - len(strategy), waiting)
            extended = min(count, waiting // repeats)
            if count > extended:
                packs.add(strategy, count - extended)
            packs.add(strategy + (length,) * repeats, extended)
            waiting -= extended * repeats
    return packs.counts()


def shortest_pack_first(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Mapping[Strategy, int]:
    """Puts each length, from the longest down, into the open packs with the most free slots (SPFHP)."""
    packs = OpenStrategies(pack_length, max_sequences_per_pack)
    for index in np.flatnonzero(histogram.counts)[::-1].tolist():
        length, waiting = index + 1, int(histogram.counts[index])
        while waiting:
            room = packs.greatest_room(length)
            if room is None:
                packs.add((length,), waiting)
                break
            strategy, count = packs.take(room)
            extended = min(count, waiting)
            if count > extended:
                packs.add(strategy, count - extended)
            packs.add((*strategy, length), extended)
            waiting -= extended
    return packs.counts()
