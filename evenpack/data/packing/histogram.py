"""Counts the sequences of each length, which is the only property of a corpus that packers use."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
from jaxtyping import Int64

from evenpack.errors import PackingError

MOST_SEQUENCES = (1 << 63) - 1
"""Largest number of sequences of one length, by int64."""

_CHUNK = 1 << 20
"""Lengths processed together; keeps temporaries at a few MB, however long a memory-mapped input is."""

_MOST_TOKENS = 2.0**62

LongPolicy = Literal["error", "truncate", "drop", "split"]
"""Treatment of sequences longer than a pack: refused, cut to its length, left out, or cut into pieces of it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthHistogram:
    """Counts of sequences by length; `counts[i]` belongs to length i + 1.

    Raises: PackingError for anything but whole numbers of 0 to 2**63 - 1, with the first one that is none and its
    length; where there is no sequence at all; or for 2**62 tokens and more.
    """

    counts: Int64[np.ndarray, " longest"]
    """Counts, which may end in zeros. Numbers of other types are converted to int64."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", _whole_counts(self.counts))
        if not self.counts.any():
            raise PackingError("there is no sequence to pack: the histogram is empty; check that the source has text")

        tokens = float(self.counts.astype(np.float64) @ np.arange(1, len(self.counts) + 1))
        if tokens >= _MOST_TOKENS:
            raise PackingError(
                f"a histogram can count up to 2**62 tokens in 64-bit integers, found {tokens:.3g}; divide the counts"
            )

    @classmethod
    def from_lengths(cls, lengths: np.ndarray | Sequence[int | float], *, longest: int) -> "LengthHistogram":
        """Counts `lengths` (one number per sequence, memory-mapped or not); all must be whole and in [1, longest].

        Raises: PackingError with the first wrong value and its index.
        """
        values = numbers(lengths, "sequence")
        chunks = (values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK))
        return cls.from_chunks(chunks, longest=longest)

    @classmethod
    def from_chunks(cls, chunks: Iterable[np.ndarray], *, longest: int) -> "LengthHistogram":
        """Counts lengths that come array by array, holding one array at a time; all must be in [1, longest].

        Raises: PackingError with the first wrong value and its index among all lengths.
        """
        longest = whole("longest", longest, "in tokens")
        counts = np.zeros(longest + 1, dtype=np.int64)
        start = 0
        for chunk in chunks:
            if (wrong := first_wrong(chunk, least=1, most=longest)) is not None:
                index, expected = wrong
                raise PackingError(f"the length at index {start + index} must be {expected}, found {chunk[index]}")
            found = np.bincount(chunk.astype(np.intp, copy=False))
            counts[: len(found)] += found
            start += len(chunk)
        return cls(counts=counts[1:])

    @classmethod
    def from_counts(cls, counts: np.ndarray | Sequence[int | float]) -> "LengthHistogram":
        """Returns the histogram of plain counts; index i counts the sequences of length i + 1."""
        return cls(counts=_whole_counts(counts))

    @property
    def sequences(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.counts @ np.arange(1, len(self.counts) + 1))

    @property
    def shortest(self) -> int:
        """The smallest length that occurs."""
        return int(np.flatnonzero(self.counts)[0]) + 1

    @property
    def longest(self) -> int:
        """The greatest length that occurs."""
        return int(np.flatnonzero(self.counts)[-1]) + 1

    def fitted(self, pack_length: int, policy: str) -> "FittedHistogram":
        """Returns the histogram in which every sequence fits into `pack_length` slots, by a `LongPolicy`.

        `split` makes pieces of `pack_length` tokens, and one of the remaining tokens if there are any.

        Raises: PackingError for an unknown policy, for `error` if a sequence is longer, and if `drop` leaves none.
        """
        if policy not in get_args(LongPolicy):
            raise PackingError(
                f"there is no policy '{policy}' for long sequences; known: {', '.join(get_args(LongPolicy))}"
            )
        pack_length = whole("pack_length", pack_length, "in slots")
        long = self.counts[pack_length:]
        too_long, kept = int(long.sum()), self.counts[:pack_length]
        if not too_long:
            return FittedHistogram(histogram=self, policy=policy, long_sequences=0, tokens_lost=0)
        if policy == "error" or (policy == "drop" and not kept.any()):
            raise PackingError(
                f"{too_long} of {self.sequences} sequences, the longest of {self.longest} tokens, do not fit into "
                f"a pack of {pack_length} slots{_REMEDIES[policy]}"
            )
        fitted = LengthHistogram(counts=kept + _pieces(long, pack_length, policy))
        lost = self.tokens - fitted.tokens
        return FittedHistogram(histogram=fitted, policy=policy, long_sequences=too_long, tokens_lost=lost)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedHistogram:
    """Sequences that all fit into a pack, and the tokens that this cost."""

    histogram: LengthHistogram
    policy: str
    """The `LongPolicy` that was applied."""
    long_sequences: int
    """Number of sequences that were longer than a pack."""
    tokens_lost: int
    """Tokens that were cut off or left out."""


_REMEDIES = {
    "error": "; take longer packs, or 'truncate', 'drop' or 'split' them",
    "drop": ", and without them none is left; take longer packs, or 'truncate' or 'split' them",
}


def _pieces(long: Int64[np.ndarray, " longer"], pack_length: int, policy: str) -> Int64[np.ndarray, " pack"]:
    """Returns the histogram that sequences of pack_length + 1, + 2, ... tokens become."""
    pieces = np.zeros(pack_length, dtype=np.int64)
    if policy == "truncate":
        pieces[-1] = long.sum()
    if policy == "split":
        whole, rest = np.divmod(np.arange(len(long)) + pack_length + 1, pack_length)
        pieces[-1] = long @ whole
        np.add.at(pieces, rest[rest > 0] - 1, long[rest > 0])
    return pieces


def first_wrong(values: np.ndarray, *, least: int, most: int) -> tuple[int, str] | None:
    """Returns the index of the first number that is not an integer from `least` to `most`, and what was expected.

    `values` are integers or floats of any width; `most` is below 2**63.
    """
    if values.dtype.kind == "f":
        values = values.astype(np.float64, copy=False)
        right = (values >= least) & (values < float(most + 1)) & (values == np.floor(values))  # False for NaN too
    else:
        right = (values >= least) & (values <= most)
    if right.all():
        return None
    index = int(np.argmin(right))
    value = values[index]
    if not np.isfinite(value) or value != np.floor(value):
        return index, "a whole number"
    return index, f"{least} or more" if value < least else f"{most} or less"


def _whole_counts(counts: Any) -> Int64[np.ndarray, " longest"]:
    values = numbers(counts, "length")
    if (wrong := first_wrong(values, least=0, most=MOST_SEQUENCES)) is not None:
        index, expected = wrong
        raise PackingError(f"a count of sequences must be {expected}; length {index + 1} has {values[index]}")
    return values.astype(np.int64, copy=False)


def whole(name: str, value: object, unit: str) -> int:
    """Returns the value. Raises: PackingError for anything but a whole number of 1 or more; True is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise PackingError(f"{name} must be a whole number of 1 or more, {unit}, found {value!r}")
    return operator.index(value)


def numbers(values: Any, of_each: str) -> np.ndarray:
    """Returns `values` as a list of numbers of any type. Raises: PackingError for anything else."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # lists of several lengths, or a tensor of a GPU
        raise PackingError(
            f"expected one whole number for each {of_each}, found {type(values).__name__} {values!r:.60} ({error})"
        ) from error
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iuf"):
        raise PackingError(
            f"expected one whole number for each {of_each}, found an array of {array.dtype} with shape {array.shape}"
        )
    return array
