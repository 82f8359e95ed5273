"""Proofs of a lower bound: no packing of a histogram can have fewer packs."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.data.packing.histogram import LengthHistogram


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificate:
    """Integer prices of lengths such that no pack within the limits is worth more than `pack_value`.

    All sequences together then fill no fewer packs than their worth divided by it.

    Source: Farley, "A note on bounding a class of linear programming problems, including cutting stock problems", 1990.
    """

    prices: Int64[np.ndarray, " pack_length"]
    """Prices, 0 or more; `prices[i]` is for length i + 1. Lengths that do not occur need no price."""
    pack_value: int

    @classmethod
    def by_tokens(cls, pack_length: int) -> "Certificate":
        """Returns the prices at which each token is worth one slot, valid at any limit of depth."""
        return cls(prices=np.arange(1, pack_length + 1), pack_value=pack_length)

    @classmethod
    def by_sequences(cls, pack_length: int, max_sequences_per_pack: int) -> "Certificate":
        """Returns the prices at which each sequence is worth one of those that a pack may hold."""
        return cls(prices=np.ones(pack_length, dtype=np.int64), pack_value=max_sequences_per_pack)

    @classmethod
    def without_solving(
        cls, histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int
    ) -> "Certificate":
        """Returns the better one for `histogram` of the two that need no computation."""
        both = (cls.by_tokens(pack_length), cls.by_sequences(pack_length, max_sequences_per_pack))
        return max(both, key=lambda certificate: certificate.bound(histogram))

    def bound(self, histogram: LengthHistogram) -> int:
        """Returns a lower bound on the packs of any packing of `histogram`, in exact integers of any size."""
        present = np.flatnonzero(histogram.counts).tolist()
        worth = sum(int(histogram.counts[index]) * int(self.prices[index]) for index in present)
        return -(-worth // self.pack_value)
