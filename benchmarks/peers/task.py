"""Defines the input and output of every packer, and the check of its packs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.baselines import sample_histogram
from evenpack.studies.lengths.reading import published_histogram


class WrongPackingError(Exception):
    """A packer lost, doubled or invented a sequence, or overfilled a pack."""


@dataclass(frozen=True, kw_only=True)
class TaskName:
    """The settings from which every process builds the same lengths."""

    histogram: str
    """Name of a published histogram; the pack length is its longest length."""
    sampled: int
    """Number of sequences drawn from the histogram and shuffled."""
    sequences: int
    """Number of these, from the first, that are packed: fewer for packers that take hours for all."""
    seed: int
    max_sequences_per_pack: int | None

    def build(self) -> "Task":
        published = published_histogram(self.histogram)
        histogram = sample_histogram(published, min(self.sampled, published.sequences), seed=self.seed)
        lengths = np.repeat(np.arange(1, len(histogram.counts) + 1), histogram.counts)
        np.random.default_rng(self.seed).shuffle(lengths)
        return Task(
            lengths=lengths[: self.sequences].copy(),
            pack_length=len(published.counts),
            max_sequences_per_pack=self.max_sequences_per_pack,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Sequences in the order of their arrival; sequence i has `lengths[i]` tokens."""

    lengths: np.ndarray
    pack_length: int
    max_sequences_per_pack: int | None

    @property
    def least_packs(self) -> int:
        """Lower bound on packs: the number that the tokens alone would fill."""
        return -(-int(self.lengths.sum()) // self.pack_length)

    @property
    def histogram(self) -> LengthHistogram:
        return LengthHistogram.from_lengths(self.lengths, longest=self.pack_length)

    def start(self, sequences: int) -> "Task":
        """Returns the task of the first sequences, with which a packer loads and compiles what it needs."""
        return Task(
            lengths=self.lengths[:sequences].copy(),
            pack_length=self.pack_length,
            max_sequences_per_pack=self.max_sequences_per_pack,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Concatenated packs: pack p has `sizes[p]` of the `members`."""

    members: np.ndarray
    sizes: np.ndarray
    holds: Literal["sequences", "lengths"]
    """Whether a member is the number of a sequence; otherwise it is its length."""

    @classmethod
    def from_lists(cls, packs: Sequence[Sequence[int]], holds: Literal["sequences", "lengths"]) -> "Packed":
        sizes = np.array([len(pack) for pack in packs], dtype=np.int64)
        members = np.fromiter((member for pack in packs for member in pack), dtype=np.int64, count=int(sizes.sum()))
        return cls(members=members, sizes=sizes, holds=holds)

    def check(self, task: Task) -> None:
        """Raises: WrongPackingError unless every sequence is in exactly one pack, and no pack holds too much."""
        expected = np.arange(len(task.lengths)) if self.holds == "sequences" else np.sort(task.lengths)
        if not np.array_equal(np.sort(self.members), expected):
            raise WrongPackingError(
                f"expected each of {len(expected)} sequences in one pack, found {len(self.members)} {self.holds}, "
                f"{len(np.unique(self.members))} of them different"
            )
        if self.sizes.sum() != len(self.members) or self.sizes.min() < 1:
            raise WrongPackingError(f"packs of {self.sizes.min()} sequences or more do not add up to all of them")
        lengths = task.lengths[self.members] if self.holds == "sequences" else self.members
        fullest = int(np.add.reduceat(lengths, np.cumsum(self.sizes) - self.sizes).max())
        if fullest > task.pack_length:
            raise WrongPackingError(f"a pack of {task.pack_length} slots holds {fullest} tokens")
        deepest = int(self.sizes.max())
        if task.max_sequences_per_pack is not None and deepest > task.max_sequences_per_pack:
            raise WrongPackingError(f"a pack holds {deepest} sequences, allowed are {task.max_sequences_per_pack}")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A packer with its input: `run` is measured, and `read` converts its result."""

    run: Callable[[], Any]
    read: Callable[[Any], Packed]
