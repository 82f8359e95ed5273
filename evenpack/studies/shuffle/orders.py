"""The order in which one epoch trains the sequences of a corpus, from a plan or simulated."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.order.pack_stream import PackStream

_DRAWN_TOGETHER = 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """One epoch of N sequences."""

    ranks: Int64[np.ndarray, " N"]
    """Position of each sequence in the corpus, in the order of training."""
    packs: Int64[np.ndarray, " N"]
    """Pack of each sequence, counted from 0; ascending."""


def drawn_order(plan: PackStream, source_ids: Integer[np.ndarray, " N"] | None) -> Order:
    """Returns the first epoch of a plan. `source_ids`: positions of the sequences in the corpus; None: in order."""
    ids, sizes = [], []
    for first in range(0, plan.packs, _DRAWN_TOGETHER):
        drawn = plan.draw(np.arange(first, min(first + _DRAWN_TOGETHER, plan.packs)))
        ids.append(drawn.sequence_ids)
        sizes.append(np.diff(drawn.offsets))
    sequence_ids = np.concatenate(ids)
    ranks = sequence_ids if source_ids is None else np.asarray(source_ids)[sequence_ids].astype(np.int64)
    return Order(ranks=ranks, packs=np.repeat(np.arange(plan.packs), np.concatenate(sizes)))


def corpus_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int) -> Order:
    """Returns the order without shuffle: sequences in order, added to a pack until the next one does not fit."""
    ranks = np.arange(len(lengths))
    return Order(ranks=ranks, packs=next_fit(lengths, pack_length=pack_length))


def buffer_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int, buffer: int, seed: int) -> Order:
    """Returns the order of a rolling buffer: random sequences leave it and are replaced by the next of the corpus."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    held = list(range(min(buffer, count)))
    ranks = np.empty(count, dtype=np.int64)
    for place in range(count):
        chosen = int(rng.integers(len(held)))
        ranks[place] = held[chosen]
        coming = buffer + place
        if coming < count:
            held[chosen] = coming
        else:
            held[chosen] = held[-1]
            held.pop()
    return Order(ranks=ranks, packs=next_fit(lengths[ranks], pack_length=pack_length))


def next_fit(lengths: Integer[np.ndarray, " N"], *, pack_length: int) -> Int64[np.ndarray, " N"]:
    """Returns the pack of each sequence where a pack is closed as soon as the next sequence does not fit."""
    packs = np.empty(len(lengths), dtype=np.int64)
    pack = filled = 0
    for place, length in enumerate(lengths.tolist()):
        if filled + length > pack_length:
            pack, filled = pack + 1, 0
        filled += length
        packs[place] = pack
    return packs
