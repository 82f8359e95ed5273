"""A source as blocks that are trained one after another, each drawn by a plan of its own.

A step reads from one or two blocks, so a file is read from front to back, a block at a time, and only the packs of a
block are drawn at random. Any position is computed directly: a resumed run reads its block and no other.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.order.blocks import Blocks
from evenpack.data.order.pack_stream import DrawnPacks
from evenpack.data.order.plan import PackPlan
from evenpack.data.permutation import derive_key, permute
from evenpack.errors import DataError

_BLOCK_ORDER = 3
"""Purpose of a key; `PackPlan` and fine-tuning use 0, 1 and 2."""
_WITHIN_BLOCK = 4
_OPEN_BLOCKS = 4
"""Blocks kept open: a step spans at most two blocks, unless it is longer than a block."""


class BlockedPlan:
    """An endless stream of packs, block by block in each epoch, and its inverse from a sequence to its pack."""

    def __init__(
        self,
        blocks: Blocks,
        sorted_sequence_ids: Integer[np.ndarray, " sequences"],
        *,
        key: int,
        shuffles_blocks: bool,
    ) -> None:
        """Takes `sorted_sequence_ids` of each block by (length, id), counted from its first sequence.

        Raises: DataError if the number of ids is not the number of sequences packed.
        """
        self.sequences = int(blocks.first_sequences[-1])
        if len(sorted_sequence_ids) != self.sequences:
            raise DataError(
                f"the index holds {len(sorted_sequence_ids)} sequence ids, but the blocks place {self.sequences}: they "
                "are of different preparations; prepare the data again"
            )
        self.blocks = blocks
        self._block_packs = blocks.packs
        self.packs = int(self._block_packs.sum())
        """Of one epoch."""
        self.max_sequences_per_pack = blocks.depth
        self.pack_length = blocks.pack_length
        self._sorted_sequence_ids = sorted_sequence_ids
        self._key = key
        self._shuffles_blocks = shuffles_blocks
        self._plan = lru_cache(maxsize=_OPEN_BLOCKS)(self._open_plan)
        self._epoch = lru_cache(maxsize=2)(self._order_blocks)

    def largest_sums(self, values: Int64[np.ndarray, " lengths"], packs: int) -> Int64[np.ndarray, " up_to_packs"]:
        """Returns the greatest sums of `values` at the lengths of a pack's sequences; see `PackStream`."""
        return self.blocks.largest_sums(values, packs)

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the packs at these positions of the stream, in any order and of any epochs.

        Raises: ValueError for a negative position.
        """
        if (stream_positions < 0).any():
            raise ValueError(f"stream positions start at 0, found {stream_positions.min()}")
        blocks, local = self._locate(stream_positions)
        drawn = {block: self._plan(block).draw(local[blocks == block]) for block in np.unique(blocks).tolist()}
        sizes = np.zeros(len(blocks), dtype=np.int64)
        for block, packs in drawn.items():
            sizes[blocks == block] = np.diff(packs.offsets)
        sequence_blocks = np.repeat(blocks, sizes)
        sequence_ids, lengths = (np.empty(len(sequence_blocks), dtype=np.int64) for _ in range(2))
        for block, packs in drawn.items():
            members = sequence_blocks == block  # packs of one block keep their order
            sequence_ids[members] = packs.sequence_ids + self.blocks.first_sequences[block]
            lengths[members] = packs.lengths
        return DrawnPacks(offsets=np.concatenate([[0], np.cumsum(sizes)]), sequence_ids=sequence_ids, lengths=lengths)

    def find(
        self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"], epoch: int
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns where in the stream each sequence is in `epoch`: (stream position, slot within the pack's sequences).

        Raises: DataError for an id that is not a sequence of that length.
        """
        if len(sequence_ids) and not 0 <= sequence_ids.min() <= sequence_ids.max() < self.sequences:
            raise DataError(
                f"sequence ids {sequence_ids.min()} to {sequence_ids.max()} asked for, this plan has {self.sequences}"
            )
        blocks = np.searchsorted(self.blocks.first_sequences, sequence_ids, side="right") - 1
        _, places_of_blocks, begins = self._epoch(epoch)
        positions, slots = (np.empty(len(sequence_ids), dtype=np.int64) for _ in range(2))
        for block in np.unique(blocks).tolist():
            members = blocks == block
            local_ids = sequence_ids[members] - self.blocks.first_sequences[block]
            local, slots[members] = self._plan(block).find(local_ids, lengths[members], epoch)
            before = epoch * self.packs + begins[places_of_blocks[block]]
            positions[members] = before + local - epoch * self._block_packs[block]
        return positions, slots

    def sequences_ahead(self, stream_position: int, blocks: int) -> list[tuple[int, int]]:
        """Returns the sequences, first and last plus one, of the block at a position and of the blocks after it.

        The blocks of later epochs follow, up to the requested number.
        """
        epoch, place = divmod(stream_position, self.packs)
        order, _, begins = self._epoch(epoch)
        index = int(np.searchsorted(begins, place, side="right")) - 1
        ahead = order[index : index + blocks].tolist()
        while len(ahead) < blocks:
            epoch += 1
            ahead += self._epoch(epoch)[0][: blocks - len(ahead)].tolist()
        first = self.blocks.first_sequences
        return [(int(first[block]), int(first[block + 1])) for block in ahead]

    def _locate(
        self, stream_positions: Int64[np.ndarray, " N"]
    ) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns the block of each position, and the position in that block's own stream."""
        epochs, places = np.divmod(stream_positions, self.packs)
        blocks, local = (np.empty(len(places), dtype=np.int64) for _ in range(2))
        for epoch in np.unique(epochs).tolist():
            members = epochs == epoch
            order, _, begins = self._epoch(epoch)
            index = np.searchsorted(begins, places[members], side="right") - 1
            blocks[members] = order[index]
            local[members] = places[members] - begins[index] + epoch * self._block_packs[order[index]]
        return blocks, local

    def _order_blocks(
        self, epoch: int
    ) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """Returns the blocks in the order of an epoch, the rank of each in it, and the first pack at each rank."""
        count = self.blocks.count
        order = np.arange(count)
        if self._shuffles_blocks:
            key = derive_key(self._key, _BLOCK_ORDER, epoch)
            order = permute(order, np.full(count, count), np.broadcast_to(key, count))
        sizes = self._block_packs[order]
        places = np.empty(count, dtype=np.int64)
        places[order] = np.arange(count)
        return order, places, np.cumsum(sizes) - sizes

    def _open_plan(self, block: int) -> PackPlan:
        first, stop = self.blocks.first_sequences[block : block + 2].tolist()
        return PackPlan(
            self.blocks.packing(block),
            self._sorted_sequence_ids[first:stop],
            key=int(derive_key(self._key, _WITHIN_BLOCK, block)),
        )
