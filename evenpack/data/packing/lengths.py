"""Packs a list of lengths, one for each sequence: what a library's user has, where `prepare` has a histogram."""

from collections.abc import Sequence

import numpy as np

from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import pack
from evenpack.data.packing.histogram import LengthHistogram, numbers
from evenpack.data.packing.strategy import Option, Packing


def pack_lengths(
    lengths: np.ndarray | Sequence[int | float],
    *,
    pack_length: int,
    algorithm: str = "auto",
    max_sequences_per_pack: int | None = None,
    **options: Option,
) -> Packing:
    """Packs sequences of the given lengths, each exactly once, into packs of `pack_length` slots.

    The result has the packs by the lengths in them (`strategies`, `counts`), how full they are (`efficiency`,
    `padding`, `packing_factor`), how many packs no packing can do without (`lower_bound`), and which sequences each
    pack holds (`assign(lengths)`). It depends on the arguments alone; the order of `lengths` does not matter.

    Args:
        lengths: in tokens, one for each sequence; a list or a numpy array, memory-mapped or not.
        pack_length: slots of a pack.
        algorithm: `auto` or one of docs/packing.md.
        max_sequences_per_pack: None: no limit.
        options: options of the algorithm, such as `weight` of least_squares.

    Raises: PackingError with the first length that is not a whole number from 1 on, and its index; if there is none, or
    one is longer than a pack; for an unknown algorithm or option.
    """
    return pack(
        histogram_of(lengths),
        algorithm,
        pack_length=pack_length,
        max_sequences_per_pack=max_sequences_per_pack,
        **options,
    )


def histogram_of(lengths: np.ndarray | Sequence[int | float]) -> LengthHistogram:
    """Returns the histogram of lengths, up to the longest possible pack. Raises: as `LengthHistogram.from_lengths`."""
    values = numbers(lengths, "sequence")
    longest = float(np.fmax.reduce(values, initial=1))  # without NaN, which is refused with its index
    return LengthHistogram.from_lengths(values, longest=int(min(max(longest, 1.0), MOST_SLOTS)))
