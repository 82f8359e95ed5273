"""Rows that were shuffled when they were prepared and are trained in that order: each is a pack of its own."""

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.order.pack_stream import DrawnPacks, largest_of
from evenpack.data.packing import Packing
from evenpack.errors import DataError


class SequentialPlan:
    """An endless stream of rows: position n is row n % rows, in every epoch.

    All rows are as long as a pack, except for the last one, which may be shorter. No seed changes the order.
    """

    def __init__(self, packing: Packing) -> None:
        """Takes a `packing` of rows by themselves."""
        lengths = np.flatnonzero(packing.histogram.counts) + 1
        self.packs = packing.packs
        """Of one epoch."""
        self.sequences = packing.sequences
        self.max_sequences_per_pack = 1
        self.pack_length = packing.pack_length
        self._last_length = int(lengths[0])
        if len(lengths) > 2 or (len(lengths) == 2 and packing.histogram.counts[lengths[0] - 1] != 1):
            raise DataError(
                f"expected rows of {packing.pack_length} tokens and at most one that is shorter, found rows of "
                f"{', '.join(map(str, lengths[:5]))}: they are of another preparation; prepare the data again"
            )

    def largest_sums(self, values: Int64[np.ndarray, " lengths"], packs: int) -> Int64[np.ndarray, " up_to_packs"]:
        """Returns the greatest of `values` at the rows' lengths; see `PackStream`."""
        return largest_of(values[[self.pack_length, self._last_length]], np.array([self.packs - 1, 1]), packs)

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the rows at these positions of the stream. Raises: ValueError for a negative position."""
        if (stream_positions < 0).any():
            raise ValueError(f"stream positions start at 0, found {stream_positions.min()}")
        rows = stream_positions % self.packs
        lengths = np.where(rows == self.packs - 1, self._last_length, self.pack_length)
        return DrawnPacks(offsets=np.arange(len(rows) + 1), sequence_ids=rows, lengths=lengths)

    def find(
        self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"], epoch: int
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns the stream position of each row in `epoch`, and its index within the pack, which is 0."""
        if len(sequence_ids) and not 0 <= sequence_ids.min() <= sequence_ids.max() < self.packs:
            raise DataError(f"rows {sequence_ids.min()} to {sequence_ids.max()} asked for, this plan has {self.packs}")
        return sequence_ids + epoch * self.packs, np.zeros_like(sequence_ids)
