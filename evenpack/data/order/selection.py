"""A selection of packs with their content: the common form of a step, a batch and a query about a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from evenpack.data.keys import derive_key, hash64
from evenpack.data.order.pack_stream import PackStream, merged
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
class PackSelection:
    """Some packs of all sources, in some order, with their sequences: N packs, M sequences."""

    sources: Int64[np.ndarray, " N"]
    """Index of each pack's source in the mixture."""
    stream_positions: Int64[np.ndarray, " N"]
    """Position of each pack in its source's endless stream."""
    offsets: Int64[np.ndarray, " N_plus_1"]
    """First sequence of each pack, and the number of sequences."""
    sequence_ids: Int64[np.ndarray, " M"]
    lengths: Int64[np.ndarray, " M"]

    @property
    def packs(self) -> int:
        return len(self.sources)

    @property
    def sizes(self) -> Int64[np.ndarray, " N"]:
        """Number of sequences of each pack."""
        return np.diff(self.offsets)

    @property
    def sequence_sources(self) -> Int64[np.ndarray, " M"]:
        """Index of each sequence's source in the mixture."""
        return np.repeat(self.sources, self.sizes)

    def members_of(self, sources: int) -> Iterator[tuple[int, Bool[np.ndarray, " M"] | slice]]:
        """Yields each of so many sources that has sequences here, and which ones: all of one that is alone."""
        if sources == 1:
            yield 0, slice(None)
            return
        of_sequences = self.sequence_sources
        for source in range(sources):
            members = of_sequences == source
            if members.any():
                yield source, members

    def take(self, packs: Int64[np.ndarray, " K"]) -> "PackSelection":
        """Returns the given packs, in the given order."""
        sizes = self.sizes[packs]
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
    packs = merged(sources, drawn)
    return PackSelection(
        sources=sources,
        stream_positions=stream_positions,
        offsets=packs.offsets,
        sequence_ids=packs.sequence_ids,
        lengths=packs.lengths,
    )


def order_hash(packs: PackSelection) -> int:
    """Returns the sum mod 2**64 of hash(source, pack, slot, sequence id), which does not depend on the assignment."""
    starts, sizes = packs.offsets[:-1], packs.sizes
    pack_keys = derive_key(packs.sources.astype(np.uint64), packs.stream_positions.astype(np.uint64))
    slots = np.arange(len(packs.sequence_ids), dtype=np.uint64) - starts.astype(np.uint64).repeat(sizes)
    hashes = hash64(hash64(pack_keys.repeat(sizes) ^ slots) ^ packs.sequence_ids.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))
