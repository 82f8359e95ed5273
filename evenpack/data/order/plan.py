"""The packs of an endless stream and the sequences in each, computed without storing any pack.

A plan holds the strategies with their cumulated counts and the sequence ids sorted by length, nothing else. The stream
runs over the epochs: position n is pack n % packs of epoch n // packs. In each epoch the order of packs is a keyed
permutation, and so are the sequences of each length, hence each epoch combines other sequences. The time to find a
pack does not depend on its position.

Terms: a *class* is all sequences of one length; a *member* is the index of a sequence in its class, before the epoch's
permutation; strategy s with count c and m slots of a length owns c x m members of that class: repetition r takes
m of them, from r x m on.

Shapes: N = packs drawn, M = sequences in them, S = slots of all strategies together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.keys import derive_key
from evenpack.data.mapped_pages import release_mapped_pages
from evenpack.data.order.pack_stream import DrawnPacks, WholeEpochs
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.data.permutation import permute, sequence_id_type
from evenpack.errors import DataError, PackingError

_PACK_ORDER = 0
_CLASS_ORDER = 1
"""Purposes of a key, so that the two kinds of permutation are independent."""

_OTHER_LENGTHS = "the lengths differ from the ones that the histogram counted; count them again"

_SORT_CHUNK = 1 << 20
"""Sequences sorted together; bounds the temporaries of `sort_by_length` to about 30 MB."""
_RELEASE_EVERY = 1 << 24
"""Sequences after which the pages of a mapped index are removed from memory: 5 % of the time of sorting, measured."""


def sort_by_length(
    lengths: Integer[np.ndarray, " sequences"],
    histogram: LengthHistogram,
    *,
    out: Integer[np.ndarray, " sequences"] | None = None,
) -> Integer[np.ndarray, " sequences"]:
    """Returns sequence ids ordered by (length, id), in `out` or a new array; `histogram` counts `lengths`.

    Raises: PackingError if `lengths` and `histogram` do not agree.
    """
    if out is None:
        out = np.empty(histogram.sequences, dtype=sequence_id_type(histogram.sequences))
    chunks = (lengths[start : start + _SORT_CHUNK] for start in range(0, len(lengths), _SORT_CHUNK))
    sort_chunks_by_length(chunks, histogram, out)
    return out


def sort_chunks_by_length(
    chunks: Iterable[Integer[np.ndarray, " chunk"]], histogram: LengthHistogram, out: Integer[np.ndarray, " sequences"]
) -> None:
    """Writes the ids of sequences ordered by (length, id) to `out`; their lengths come array by array.

    This is a counting sort: each chunk is sorted separately, and each of its runs of equal lengths is written after the
    run of the previous chunk. A mapped `out` is therefore written at as many positions as there are lengths, at each
    from front to back; its pages do not stay in memory, and except for `out` that depends on the size of a chunk alone.

    Raises: PackingError if the lengths and `histogram` do not agree, or `out` has another size.
    """
    if len(out) != histogram.sequences:
        raise PackingError(f"the index has space for {len(out)} ids, but the histogram counts {histogram.sequences}")
    class_begins, longest = _class_begins(histogram), histogram.longest
    next_places = class_begins[:-1].copy()
    narrow = np.uint16 if longest < 1 << 16 else np.uint32  # numpy sorts 16 bits by radix
    start = 0
    for chunk in chunks:
        if len(chunk) and not 1 <= chunk.min() <= chunk.max() <= longest:
            raise PackingError(_OTHER_LENGTHS)
        keys = chunk.astype(narrow, copy=False)
        order = np.argsort(keys, kind="stable")
        ascending = keys[order]
        # The different lengths of the sorted chunk, and where the run of each begins and ends.
        begins = np.flatnonzero(np.append(len(chunk) > 0, ascending[1:] != ascending[:-1]))
        ends = np.append(begins[1:], len(chunk))[: len(begins)]
        lengths = ascending[begins].astype(np.int64)
        places = next_places[lengths]
        next_places[lengths] += ends - begins
        if (next_places[lengths] > class_begins[lengths + 1]).any():
            raise PackingError(_OTHER_LENGTHS)
        sequence_ids = (order + start).astype(out.dtype)
        for place, begin, end in zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True):
            out[place : place + end - begin] = sequence_ids[begin:end]
        if (start + len(chunk)) // _RELEASE_EVERY > start // _RELEASE_EVERY:
            release_mapped_pages([out])
        start += len(chunk)
    if start != histogram.sequences:
        raise PackingError(f"found {start} lengths, but their histogram counts {histogram.sequences}")


class PackPlan(WholeEpochs):
    """One block of one source: an endless stream of packs.

    A pure function of the arguments: no state, no random generator. `sorted_sequence_ids` (from `sort_by_length`)
    may be memory-mapped and is read only where packs are drawn.
    """

    def __init__(
        self,
        packing: Packing,
        sorted_sequence_ids: Integer[np.ndarray, " sequences"],
        *,
        key: int,
        shuffles_packs: bool = True,
        first_sequence: int = 0,
    ) -> None:
        """Takes the `key` of all permutations, and the sequence from which `sorted_sequence_ids` are counted.

        Raises: DataError if the number of ids is not the number of sequences packed.
        """
        if len(sorted_sequence_ids) != packing.sequences:
            raise DataError(
                f"the index holds {len(sorted_sequence_ids)} sequence ids, but its strategies place "
                f"{packing.sequences} sequences: they are of different preparations; prepare the data again"
            )
        self.packs = packing.packs
        self.sequences = packing.sequences
        self.max_sequences_per_pack = packing.depth
        self.pack_length = packing.pack_length
        self._sorted_sequence_ids = np.asarray(sorted_sequence_ids)
        self._key = key
        self._shuffles_packs = shuffles_packs
        self._first_sequence = first_sequence
        self._class_begins = _class_begins(packing.histogram)
        self._class_sizes = np.diff(self._class_begins)
        self._slots = _StrategySlots.of(packing, self._class_begins)

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the packs at these positions of the stream, in any order and of any epochs.

        Raises: ValueError for a negative position.
        """
        slots = self._slots
        epochs, places = self.places(stream_positions)
        packs = self._permute_packs(places, epochs)
        strategies = np.searchsorted(slots.strategy_ends, packs, side="right")
        repetitions = packs - slots.strategy_begins[strategies]
        sizes = slots.sizes[strategies]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        drawn = np.repeat(slots.begins[strategies] - offsets[:-1], sizes) + np.arange(offsets[-1])
        lengths = slots.lengths[drawn]
        begins = self._class_begins[lengths]
        members = slots.first_members[drawn] + np.repeat(repetitions, sizes) * slots.strides[drawn]
        ranks = self._permute_members(members, lengths, np.repeat(epochs, sizes))
        sequence_ids = self._sorted_sequence_ids[begins + ranks].astype(np.int64) + self._first_sequence
        return DrawnPacks(offsets=offsets, sequence_ids=sequence_ids, lengths=lengths)

    def _permute_packs(
        self, packs: Int64[np.ndarray, " N"], epochs: Int64[np.ndarray, " N"]
    ) -> Int64[np.ndarray, " N"]:
        if not self._shuffles_packs:
            return packs
        keys = derive_key(self._key, _PACK_ORDER, epochs.astype(np.uint64))
        return permute(packs, np.full(len(packs), self.packs), keys)

    def _permute_members(
        self,
        members: Int64[np.ndarray, " M"],
        lengths: Int64[np.ndarray, " M"],
        epochs: Int64[np.ndarray, " M"],
    ) -> Int64[np.ndarray, " M"]:
        keys = derive_key(self._key, _CLASS_ORDER, epochs.astype(np.uint64), lengths.astype(np.uint64))
        return permute(members, self._class_sizes[lengths], keys)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StrategySlots:
    """The slots of all strategies in one table."""

    strategy_begins: Int64[np.ndarray, " strategies"]
    """First pack of each strategy."""
    strategy_ends: Int64[np.ndarray, " strategies"]
    begins: Int64[np.ndarray, " strategies"]
    """First row of each strategy in the table of slots."""
    sizes: Int64[np.ndarray, " strategies"]
    lengths: Int64[np.ndarray, " S"]
    first_members: Int64[np.ndarray, " S"]
    """The member that the slot takes in repetition 0; in repetition r it takes r strides more."""
    strides: Int64[np.ndarray, " S"]
    """How many slots of the strategy have this length."""

    @classmethod
    def of(cls, packing: Packing, class_begins: Int64[np.ndarray, " classes"]) -> "_StrategySlots":
        lengths, sizes = packing.slot_lengths, packing.depths
        strategies = np.repeat(np.arange(len(sizes)), sizes)
        is_first = np.ones(len(lengths), dtype=np.bool_)
        is_first[1:] = (lengths[1:] != lengths[:-1]) | (strategies[1:] != strategies[:-1])
        quota_firsts = np.flatnonzero(is_first)
        multiplicities = np.diff(np.append(quota_firsts, len(lengths)))
        by_class = np.argsort(lengths[quota_firsts], kind="stable")
        taken = (packing.counts[strategies[quota_firsts]] * multiplicities)[by_class]
        quota_begins = np.cumsum(taken) - taken
        quota_slots = quota_firsts[by_class]
        first_members = np.empty(len(lengths), dtype=np.int64)
        first_members[quota_slots] = quota_begins - class_begins[lengths[quota_slots]]
        copies = np.arange(len(lengths)) - np.repeat(quota_firsts, multiplicities)
        first_members = np.repeat(first_members[quota_firsts], multiplicities) + copies
        ends = np.cumsum(packing.counts)
        return cls(
            strategy_begins=ends - packing.counts,
            strategy_ends=ends,
            begins=np.cumsum(sizes) - sizes,
            sizes=sizes,
            lengths=lengths,
            first_members=first_members,
            strides=np.repeat(multiplicities, multiplicities),
        )


def _class_begins(histogram: LengthHistogram) -> Int64[np.ndarray, " classes"]:
    """Returns the start of each length's class among all sequences sorted by length, including index 0 and the end."""
    counts = histogram.counts[: histogram.longest]
    return np.concatenate([np.zeros(2, dtype=np.int64), np.cumsum(counts)])
