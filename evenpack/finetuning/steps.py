"""The sequences of each update: a function of (seed, epoch), the same in every layout.

A step counts packs of a single packing of all sequences; or single sequences, which the packed layout packs step by
step. Each epoch has every sequence once; its last step may be smaller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import Batching, Layout
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.permutation import derive_key, permute

_SEQUENCE_ORDER = 2
"""Purpose of a key; `PackPlan` uses 0 and 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOrder:
    """The steps of every epoch."""

    lengths: Int64[np.ndarray, " N"]
    """Lengths of all sequences."""
    pack_length: int
    """Slots of a pack; no sequence is longer."""
    layout: Layout
    batching: Batching
    items_per_step: int
    """Packs or sequences."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        items = self._plan.packs if self.batching == "packs" else len(self.lengths)
        return -(-items // self.items_per_step)

    def epoch(self, epoch: int) -> Iterator[PackSelection]:
        """Yields the packs of each step of an epoch; a sequence that is not packed is a pack of its own."""
        for step in range(self.steps_per_epoch):
            first = step * self.items_per_step
            if self.batching == "packs":
                last = min(first + self.items_per_step, self._plan.packs)
                yield _drawn(self._plan, epoch * self._plan.packs + np.arange(first, last))
            else:
                yield self._selected(self._order(epoch)[first : first + self.items_per_step])

    @cached_property
    def _plan(self) -> PackPlan:
        return _planned(self.lengths, "auto", pack_length=self.pack_length, seed=self.seed)

    def _order(self, epoch: int) -> Int64[np.ndarray, " N"]:
        count = len(self.lengths)
        keys = np.full(count, derive_key(self.seed, _SEQUENCE_ORDER, epoch), dtype=np.uint64)
        return permute(np.arange(count), np.full(count, count, dtype=np.int64), keys)

    def _selected(self, sequence_ids: Int64[np.ndarray, " M"]) -> PackSelection:
        lengths = self.lengths[sequence_ids]
        count = len(sequence_ids)
        if self.layout != "packed":
            return _selection(np.arange(count + 1), sequence_ids, lengths)
        plan = _planned(lengths, "longest_pack_first", pack_length=self.pack_length, seed=self.seed)
        drawn = plan.draw(np.arange(plan.packs))
        return _selection(drawn.offsets, sequence_ids[drawn.sequence_ids], drawn.lengths)


def _planned(lengths: Int64[np.ndarray, " M"], algorithm: str, *, pack_length: int, seed: int) -> PackPlan:
    histogram = LengthHistogram.from_lengths(lengths, longest=pack_length)
    packing = pack(histogram, algorithm, pack_length=pack_length)
    return PackPlan(packing, sort_by_length(lengths, histogram), key=int(derive_key(seed)))


def _drawn(plan: PackPlan, positions: Int64[np.ndarray, " P"]) -> PackSelection:
    drawn = plan.draw(positions)
    return _selection(drawn.offsets, drawn.sequence_ids, drawn.lengths)


def _selection(
    offsets: Int64[np.ndarray, " P_plus_1"], sequence_ids: Int64[np.ndarray, " M"], lengths: Int64[np.ndarray, " M"]
) -> PackSelection:
    packs = len(offsets) - 1
    return PackSelection(
        sources=np.zeros(packs, dtype=np.int64),
        stream_positions=np.arange(packs),
        offsets=offsets,
        sequence_ids=sequence_ids,
        lengths=lengths,
    )
