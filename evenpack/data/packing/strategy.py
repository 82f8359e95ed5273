"""The exact result of packing: the combinations of lengths that form packs, and how often each is used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Int64

from evenpack.data.packing.certificate import Certificate
from evenpack.data.packing.histogram import LengthHistogram, numbers
from evenpack.errors import PackingError

Strategy = tuple[int, ...]
"""The lengths of one pack, longest first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Certified:
    """The result of a packer that can prove a lower bound."""

    counts: Mapping[Strategy, int]
    """Number of uses of each strategy."""
    certificate: Certificate


Option = int | float | str
"""An option of an algorithm, given by keyword."""

Packer = Callable[..., Mapping[Strategy, int] | Certified]
"""(histogram, pack length, most sequences per pack, *, options) -> how often each strategy is used."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Strategies that place each sequence of a histogram exactly once.

    Raises: PackingError where a strategy is malformed or the strategies do not add up to the histogram.
    """

    algorithm: str
    pack_length: int
    """Slots of a pack."""
    histogram: LengthHistogram
    strategies: tuple[Strategy, ...]
    """The strategies; lengths of each descend and sum to `pack_length` at most; no two are the same."""
    counts: Int64[np.ndarray, " strategies"]
    """Packs of each strategy, 1 or more."""
    cpu_seconds: float
    """CPU time that the algorithm took."""
    certificate: Certificate | None = None
    """Proof of `lower_bound`; None: the number of tokens is the proof."""

    def __repr__(self) -> str:
        """Returns a line with what counts; the arrays have names of their own."""
        return (
            f"Packing({self.algorithm}: {self.sequences:,} sequences in {self.packs:,} x {self.pack_length:,} slots, "
            f"{100 * self.efficiency:.2f} % efficient)"
        )

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.strategies):
            raise PackingError(f"{len(self.strategies)} strategies have {len(self.counts)} counts")
        if len(set(self.strategies)) != len(self.strategies):
            raise PackingError("a strategy is listed twice; sum the counts of equal strategies")
        for strategy, count in zip(self.strategies, self.counts, strict=True):
            if count < 1:
                raise PackingError(f"strategy {strategy} is used {count} times; leave out unused strategies")
            if not strategy or strategy[-1] < 1 or list(strategy) != sorted(strategy, reverse=True):
                raise PackingError(f"strategy {strategy} must hold positive lengths, longest first")
            if sum(strategy) > self.pack_length:
                raise PackingError(f"strategy {strategy} takes {sum(strategy)} slots of {self.pack_length}")
        self._check_conservation()

    def _check_conservation(self) -> None:
        longest = max(self.pack_length, len(self.histogram.counts))
        placed = np.zeros(longest + 1, dtype=np.int64)
        expected = placed.copy()
        np.add.at(placed, self.slot_lengths, np.repeat(self.counts, self.depths))
        expected[1 : len(self.histogram.counts) + 1] = self.histogram.counts
        wrong = np.flatnonzero(placed != expected)
        if len(wrong):
            raise PackingError(
                f"the strategies place {placed[wrong[0]]} sequences of length {wrong[0]}, the histogram has "
                f"{expected[wrong[0]]}"
            )

    @property
    def slot_lengths(self) -> Int64[np.ndarray, " slots"]:
        """The lengths of all strategies concatenated."""
        return np.fromiter(chain.from_iterable(self.strategies), dtype=np.int64)

    @property
    def depths(self) -> Int64[np.ndarray, " strategies"]:
        """Sequences in a pack of each strategy."""
        return np.fromiter(map(len, self.strategies), dtype=np.int64)

    def assign(self, lengths: np.ndarray | Sequence[int | float]) -> list[Int64[np.ndarray, " members"]]:
        """Returns the sequences of each pack, as indices of `lengths`, the longest of a pack first.

        Packs come strategy by strategy. Of sequences of one length the first ones come first.

        Raises: PackingError if these are not the lengths that were packed.
        """
        values = numbers(lengths, "sequence")
        slots = np.concatenate(
            [np.tile(strategy, count) for strategy, count in zip(self.strategies, self.counts, strict=True)]
        )
        by_length = np.argsort(values, kind="stable")
        by_slot = np.argsort(slots, kind="stable")
        if len(values) != len(slots) or not np.array_equal(values[by_length], slots[by_slot]):
            raise PackingError(
                f"expected the lengths that were packed ({self.sequences:,} sequences of {self.tokens:,} tokens), "
                f"found others ({len(values):,} sequences)"
            )
        sequences = np.empty(len(slots), dtype=np.int64)
        sequences[by_slot] = by_length
        return np.split(sequences, np.cumsum(np.repeat(self.depths, self.counts))[:-1])

    @property
    def packs(self) -> int:
        return int(self.counts.sum())

    @property
    def sequences(self) -> int:
        return self.histogram.sequences

    @property
    def tokens(self) -> int:
        return self.histogram.tokens

    @property
    def padding(self) -> int:
        """Slots of all packs that hold no token."""
        return self.packs * self.pack_length - self.tokens

    @property
    def efficiency(self) -> float:
        """Fraction of slots that hold a token."""
        return self.tokens / (self.packs * self.pack_length)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack, on average."""
        return self.sequences / self.packs

    @property
    def depth(self) -> int:
        """Sequences of the fullest pack."""
        return int(self.depths.max())

    @property
    def lower_bound(self) -> int:
        """Lower bound on the packs of any packing: by the certificate, or else by the number of tokens."""
        certificate = self.certificate or Certificate.by_tokens(self.pack_length)
        return certificate.bound(self.histogram)

    @property
    def gap(self) -> float:
        """Packs above the lower bound, as a fraction of it."""
        return self.packs / self.lower_bound - 1
