"""A selection of packs with their content: the common form of a step, a batch and a query about a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.pack_stream import DrawnPacks, PackStream, merged
from evenpack.data.permutation import derive_key, hash64
from evenpack.data.ranges import ranges
from evenpack.data.sequences import SequenceView


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """One source of the mixture: its sequences and how they form packs."""

    view: SequenceView
    plan: PackStream
    key: int
    """A key that identifies the source, whatever the order in which a run names the sources."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackSelection(DrawnPacks):
    """Some packs of all sources, in some order, with their content: N packs, M sequences."""

    sources: Int64[np.ndarray, " N"]
    """Index of each pack's source in the mixture."""
    stream_positions: Int64[np.ndarray, " N"]
    """Position of each pack in its source's endless stream."""

    @property
    def packs(self) -> int:
        return len(self.sources)

    def take(self, packs: Int64[np.ndarray, " K"]) -> "PackSelection":
        """Returns the given packs, in the given order."""
        sizes = np.diff(self.offsets)[packs]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        members = ranges(self.offsets[packs], sizes)
        return PackSelection(
            sources=self.sources[packs],
            stream_positions=self.stream_positions[packs],
            offsets=offsets,
            sequence_ids=self.sequence_ids[members],
            lengths=self.lengths[members],
        )


def select_packs(
    packed_sources: Sequence[PackedSource],
    sources: Int64[np.ndarray, " N"],
    stream_positions: Int64[np.ndarray, " N"],
) -> PackSelection:
    """Returns the packs at these positions of their sources' streams; `sources` are indices into `packed_sources`."""
    drawn = {index: source.plan.draw(stream_positions[sources == index]) for index, source in enumerate(packed_sources)}
    return PackSelection(sources=sources, stream_positions=stream_positions, **vars(merged(sources, drawn)))


def order_hash(packs: PackSelection) -> int:
    """Returns the sum mod 2**64 of hash(source, pack, slot, sequence id), which does not depend on the assignment."""
    starts = packs.offsets[:-1]
    sizes = packs.offsets[1:] - starts
    pack_keys = derive_key(packs.sources.astype(np.uint64), packs.stream_positions.astype(np.uint64))
    slots = np.arange(len(packs.sequence_ids), dtype=np.uint64) - starts.astype(np.uint64).repeat(sizes)
    hashes = hash64(hash64(pack_keys.repeat(sizes) ^ slots) ^ packs.sequence_ids.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))
