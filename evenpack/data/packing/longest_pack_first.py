"""Longest-pack-first histogram packing: best fit decreasing that splits the count of a length."""

from collections.abc import Mapping

import numpy as np

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.open_strategies import OpenStrategies
from evenpack.data.packing.strategy import Strategy


def longest_pack_first(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Mapping[Strategy, int]:
    """Puts each length, from the longest down, into the fullest open packs in which it fits (LPFHP).

    A pack takes as many sequences of the length at once as fit, so that 256 is packed as [256, 256] into 512 slots and
    not left open for shorter sequences.

    Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), appendix R.
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
