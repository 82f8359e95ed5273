"""Shortest-pack-first histogram packing: worst fit decreasing over whole histogram bins."""

from collections.abc import Mapping

import numpy as np

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.open_strategies import OpenStrategies
from evenpack.data.packing.strategy import Strategy


def shortest_pack_first(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
) -> Mapping[Strategy, int]:
    """Puts each length, from the longest down, into the open packs with the most free slots (SPFHP).

    Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), section 3.1.1.
    """
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
