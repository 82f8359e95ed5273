"""The items of simulated steps: single sequences or packs, drawn independently of one another."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.packing import LengthHistogram, Packing


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemKinds:
    """The kinds of items: sequences by length, or packs by strategy."""

    probabilities: Float64[np.ndarray, " kinds"]
    tokens: Int64[np.ndarray, " kinds"]
    """Real tokens of an item."""
    squared_lengths: Int64[np.ndarray, " kinds"]
    """Sum of length² over its sequences."""
    padding_squared_lengths: Int64[np.ndarray, " kinds"]
    """The same over the segments of padding in a pack."""
    sequences: Int64[np.ndarray, " kinds"]

    @property
    def mean_sequences(self) -> float:
        """Returns the mean sequences of an item."""
        return float(self.probabilities @ self.sequences)

    @property
    def work(self) -> Float64[np.ndarray, "kinds 2"]:
        """Returns the quantities on which times of steps depend linearly, apart from waiting and rounding."""
        return np.stack([self.tokens, self.squared_lengths + self.padding_squared_lengths], axis=1).astype(np.float64)

    def draw(self, generator: np.random.Generator, items: int) -> Int64[np.ndarray, " items"]:
        """Returns the kinds of independent items in random order: a shuffled sorted sample, which is fastest."""
        counts = generator.multinomial(items, self.probabilities)
        kinds = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
        generator.shuffle(kinds)
        return kinds.astype(np.int64)


def sequence_kinds(histogram: LengthHistogram) -> ItemKinds:
    """Returns a kind for each length that occurs."""
    lengths = np.flatnonzero(histogram.counts) + 1
    return ItemKinds(
        probabilities=histogram.counts[lengths - 1] / histogram.sequences,
        tokens=lengths,
        squared_lengths=lengths**2,
        padding_squared_lengths=np.zeros_like(lengths),
        sequences=np.ones_like(lengths),
    )


def pack_kinds(packing: Packing, *, max_sequence_length: int) -> ItemKinds:
    """Returns a kind for each strategy."""
    lengths, starts = packing.slot_lengths, np.cumsum(packing.depths) - packing.depths
    tokens = np.add.reduceat(lengths, starts)
    return ItemKinds(
        probabilities=packing.counts / packing.packs,
        tokens=tokens,
        squared_lengths=np.add.reduceat(lengths**2, starts),
        padding_squared_lengths=squared_padding(packing.pack_length - tokens, max_sequence_length),
        sequences=packing.depths,
    )


def squared_padding(slots: Int64[np.ndarray, "*shape"], max_sequence_length: int) -> Int64[np.ndarray, "*shape"]:
    """Returns the sum of length² over the segments of so many padding slots (`data/batches/placement.py`)."""
    whole, rest = np.divmod(slots, max_sequence_length)
    squared: Int64[np.ndarray, "*shape"] = whole * max_sequence_length**2 + rest**2
    return squared
