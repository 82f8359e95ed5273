"""The interface of every plan of one source: an endless stream of packs, drawn at any position."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnPacks:
    """The sequences of N packs; pack i has `[offsets[i], offsets[i + 1])`, the longest first."""

    offsets: Int64[np.ndarray, " N_plus_1"]
    sequence_ids: Int64[np.ndarray, " M"]
    lengths: Int64[np.ndarray, " M"]


@runtime_checkable
class PackStream(Protocol):
    """A pure function of a position; of one form, position n is pack n % packs of epoch n // packs."""

    @property
    def packs(self) -> int:
        """Packs of one epoch."""

    @property
    def sequences(self) -> int:
        """Sequences of one epoch."""

    @property
    def max_sequences_per_pack(self) -> int: ...

    @property
    def pack_length(self) -> int:
        """Slots of a pack."""

    def epochs(self, stream_positions: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the epoch of each position."""

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the packs at these positions of the stream, in any order and of any epochs.

        Raises: ValueError for a negative position.
        """


class WholeEpochs:
    """The packs of one form, epoch after epoch."""

    packs: int
    """Packs of one epoch."""

    def epochs(self, stream_positions: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the epoch of each position."""
        return stream_positions // self.packs

    def places(
        self, stream_positions: Int64[np.ndarray, " N"]
    ) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns the epoch of each position, and the place in it. Raises: ValueError for a negative position."""
        if (stream_positions < 0).any():
            raise ValueError(f"stream positions start at 0, found {stream_positions.min()}")
        return np.divmod(stream_positions, self.packs)


def merged(groups: Int64[np.ndarray, " N"], drawn: Mapping[int, DrawnPacks]) -> DrawnPacks:
    """Returns N packs, each the next of those that were `drawn` for its group."""
    if len(drawn) == 1:
        return next(iter(drawn.values()))
    sizes = np.zeros(len(groups), dtype=np.int64)
    for group, packs in drawn.items():
        sizes[groups == group] = np.diff(packs.offsets)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    sequence_groups = np.repeat(groups, sizes)
    sequence_ids, lengths = (np.empty(offsets[-1], dtype=np.int64) for _ in range(2))
    for group, packs in drawn.items():
        members = sequence_groups == group  # packs of one group keep their order, and so do their sequences
        sequence_ids[members] = packs.sequence_ids
        lengths[members] = packs.lengths
    return DrawnPacks(offsets=offsets, sequence_ids=sequence_ids, lengths=lengths)
