"""A source as blocks that are trained one after another, each drawn by a plan of its own.

A step reads from one or two blocks, so a file is read from front to back, a block at a time, and only the packs of a
block are drawn at random. Any position is computed directly: a resumed run reads its block and no other.

Blocks are contiguous ranges of the sequences, each packed separately, stored in a few arrays:

blocks.json                      pack length, and the algorithm that packed each block
block_first_sequences.npy        int64[B + 1]
block_first_strategies.npy       int64[B + 1]
block_strategy_counts.npy        int64[strategies]: packs of each strategy
block_strategy_depths.npy        int32[strategies]: sequences in a pack of each strategy
block_slot_lengths.npy           int32[slots]: the lengths of all strategies concatenated
block_sorted_sequences.npy       ids by length within each block, counted from the block's first sequence

B = blocks.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64, Integer

from evenpack.data.keys import derive_key
from evenpack.data.order.pack_stream import DrawnPacks, WholeEpochs, merged
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.data.permutation import permute, sequence_id_type
from evenpack.data.sequences import SequenceView
from evenpack.data.tokens.array_file import damage_named, mapped_array, open_array, write_array
from evenpack.errors import DataError
from evenpack.files import read_json, write_json

_DESCRIPTION = "blocks.json"
_SORTED = "block_sorted_sequences.npy"

_ARRAYS = "block_*.npy"

Packer = Callable[[LengthHistogram], Packing]


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The packings of all blocks. A block's `Packing` is built on request."""

    pack_length: int
    algorithms: tuple[str, ...]
    """Algorithm of each block."""
    first_sequences: Int64[np.ndarray, " B_plus_1"]
    first_strategies: Int64[np.ndarray, " B_plus_1"]
    strategy_counts: Int64[np.ndarray, " strategies"]
    strategy_depths: Int32[np.ndarray, " strategies"]
    slot_lengths: Int32[np.ndarray, " slots"]

    @classmethod
    def of(cls, packings: list[Packing]) -> "Blocks":
        """Builds the blocks from the packings of consecutive blocks, at least one."""
        return cls(
            pack_length=packings[0].pack_length,
            algorithms=tuple(packing.algorithm for packing in packings),
            first_sequences=_cumulated([packing.sequences for packing in packings]),
            first_strategies=_cumulated([len(packing.strategies) for packing in packings]),
            strategy_counts=np.concatenate([packing.counts for packing in packings]),
            strategy_depths=np.concatenate([packing.depths for packing in packings]).astype(np.int32),
            slot_lengths=np.concatenate([packing.slot_lengths for packing in packings]).astype(np.int32),
        )

    @property
    def count(self) -> int:
        return len(self.first_sequences) - 1

    @property
    def packs(self) -> Int64[np.ndarray, " B"]:
        """Packs of each block."""
        cumulated = np.concatenate([[0], np.cumsum(self.strategy_counts)])
        return np.diff(cumulated[self.first_strategies])

    def packing(self, block: int) -> Packing:
        """Returns the strategies of one block."""
        first, last = self.first_strategies[block : block + 2].tolist()
        depths, counts = self.strategy_depths[first:last], np.array(self.strategy_counts[first:last])
        begin = int(self.strategy_depths[:first].sum(dtype=np.int64))
        lengths = self.slot_lengths[begin : begin + int(depths.sum(dtype=np.int64))]
        histogram = np.bincount(lengths, weights=np.repeat(counts, depths), minlength=int(lengths.max()) + 1)
        return Packing(
            algorithm=self.algorithms[block],
            pack_length=self.pack_length,
            histogram=LengthHistogram(counts=histogram[1:].astype(np.int64)),
            strategies=tuple(tuple(part.tolist()) for part in np.split(lengths, np.cumsum(depths)[:-1])),
            counts=counts,
            cpu_seconds=0.0,
        )


def store_blocks(directory: Path, view: SequenceView, bounds: list[int], packer: Packer) -> Packing:
    """Packs and stores the blocks of a view, which begin at `bounds[:-1]`, one block's lengths in memory at a time.

    Returns: all blocks' packs as one packing of the view.

    Raises: PackingError if they cannot be packed so.
    """
    packings = []
    widest = max(np.diff(bounds).tolist())
    with mapped_array(directory / _SORTED, view.count, sequence_id_type(widest)) as sorted_sequences:
        for first, stop in pairwise(bounds):
            lengths = view.lengths(first, stop)
            histogram = LengthHistogram.from_lengths(lengths, longest=view.max_sequence_length)
            packings.append(packer(histogram))
            sort_by_length(lengths, histogram, out=sorted_sequences[first:stop])
    blocks = Blocks.of(packings)
    for name in _array_names():
        write_array(directory / f"block_{name}.npy", getattr(blocks, name))
    write_json(directory / _DESCRIPTION, {"pack_length": blocks.pack_length, "algorithms": blocks.algorithms})
    return _merged(packings)


def open_blocks(directory: Path) -> tuple[Blocks, Integer[np.ndarray, " sequences"]]:
    """Opens stored blocks and the sorted ids of each, memory-mapped.

    Raises: DataError if a file is missing or broken.
    """
    arrays = {name: open_array(directory / f"block_{name}.npy") for name in _array_names()}
    with damage_named(directory / _DESCRIPTION):
        description = read_json(directory / _DESCRIPTION)
        blocks = Blocks(pack_length=description["pack_length"], algorithms=tuple(description["algorithms"]), **arrays)
    return blocks, open_array(directory / _SORTED)


def _merged(packings: list[Packing]) -> Packing:
    """Returns the packs of all blocks as one packing."""
    counts: Counter[tuple[int, ...]] = Counter()
    for packing in packings:
        counts.update(dict(zip(packing.strategies, packing.counts.tolist(), strict=True)))
    longest = max(len(packing.histogram.counts) for packing in packings)
    histogram = sum(np.pad(one.histogram.counts, (0, longest - len(one.histogram.counts))) for one in packings)
    return Packing(
        algorithm=", ".join(sorted({packing.algorithm for packing in packings})),
        pack_length=packings[0].pack_length,
        histogram=LengthHistogram(counts=np.asarray(histogram)),
        strategies=tuple(counts),
        counts=np.array(list(counts.values()), dtype=np.int64),
        cpu_seconds=sum(packing.cpu_seconds for packing in packings),
    )


def _cumulated(sizes: list[int]) -> Int64[np.ndarray, " B_plus_1"]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _array_names() -> list[str]:
    return [field.name for field in fields(Blocks) if field.name not in ("pack_length", "algorithms")]


def block_files(directory: Path) -> list[Path]:
    """Returns the files of stored blocks that exist in a folder."""
    return [path for pattern in (_DESCRIPTION, _ARRAYS) for path in directory.glob(pattern)]


_BLOCK_ORDER = 3
"""Purpose of a key; `PackPlan` and fine-tuning use 0, 1 and 2."""
_WITHIN_BLOCK = 4
_OPEN_BLOCKS = 4
"""Blocks kept open: a step spans at most two blocks, unless it is longer than a block."""


class BlockedPlan(WholeEpochs):
    """An endless stream of packs, block by block in each epoch."""

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
        self.max_sequences_per_pack = int(blocks.strategy_depths.max())
        self.pack_length = blocks.pack_length
        self._sorted_sequence_ids = sorted_sequence_ids
        self._key = key
        self._shuffles_blocks = shuffles_blocks
        self._plan = lru_cache(maxsize=_OPEN_BLOCKS)(self._open_plan)
        self._epoch = lru_cache(maxsize=2)(self._order_blocks)

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the packs at these positions of the stream, in any order and of any epochs.

        Raises: ValueError for a negative position.
        """
        blocks, local = self._locate(stream_positions)
        drawn = {block: self._plan(block).draw(local[blocks == block]) for block in np.unique(blocks).tolist()}
        return merged(blocks, drawn)

    def sequences_ahead(self, stream_position: int, blocks: int) -> list[tuple[int, int]]:
        """Returns the sequences, first and last plus one, of the block at a position and of the blocks after it.

        The blocks of later epochs follow, up to the requested number.
        """
        epoch, place = divmod(stream_position, self.packs)
        order, begins = self._epoch(epoch)
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
        epochs, places = self.places(stream_positions)
        blocks, local = (np.empty(len(places), dtype=np.int64) for _ in range(2))
        for epoch in np.unique(epochs).tolist():
            members = epochs == epoch
            order, begins = self._epoch(epoch)
            index = np.searchsorted(begins, places[members], side="right") - 1
            blocks[members] = order[index]
            local[members] = places[members] - begins[index] + epoch * self._block_packs[order[index]]
        return blocks, local

    def _order_blocks(self, epoch: int) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
        """Returns the blocks in the order of an epoch, and the first pack at each rank."""
        count = self.blocks.count
        order = np.arange(count)
        if self._shuffles_blocks:
            key = derive_key(self._key, _BLOCK_ORDER, epoch)
            order = permute(order, np.full(count, count), np.broadcast_to(key, count))
        sizes = self._block_packs[order]
        return order, np.cumsum(sizes) - sizes

    def _open_plan(self, block: int) -> PackPlan:
        first, stop = self.blocks.first_sequences[block : block + 2].tolist()
        return PackPlan(
            self.blocks.packing(block),
            self._sorted_sequence_ids[first:stop],
            key=int(derive_key(self._key, _WITHIN_BLOCK, block)),
            first_sequence=first,
        )
