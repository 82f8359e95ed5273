"""No packing: the baseline that pads every sequence."""

from collections.abc import Mapping

import numpy as np

from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy


def unpacked(histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int) -> Mapping[Strategy, int]:
    """Gives each sequence a pack of its own, whatever the limits."""
    return {(index + 1,): int(histogram.counts[index]) for index in np.flatnonzero(histogram.counts).tolist()}
