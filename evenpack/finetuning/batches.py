"""The sequences of each update, and their layout for the encoder, packed, un-padded or padded.

The steps are a function of (seed, epoch), the same in every layout. A step counts packs of a single packing of all
sequences; or single sequences, which the packed layout packs step by step. Each epoch has every sequence once; its last
step may be smaller.

Shapes: T = slots, S = segments, N = sequences of the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from evenpack.data.batches.placement import Placer
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import Batching, CostWeights, Layout, StepShape
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.permutation import derive_key, permute
from evenpack.finetuning.features import Features

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


@dataclass(frozen=True, kw_only=True)
class FinetuneBatch:
    """The inputs of an encoder (`evenpack.batch.ModelInputs`), and the targets of its head."""

    tokens: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    token_type_ids: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " S_plus_1"]
    """int32, from 0 to T; padding forms segments of its own."""
    max_sequence_length: int
    row_slots: int
    position_rows: int
    sequence_starts: Int[Tensor, " N"]
    """Slot of each sequence's first token."""
    sequence_of_slot: Int[Tensor, " T"]
    """Index within the batch; N for padding."""
    labels: Int[Tensor, " N *parts"] | Float[Tensor, " N"]
    """Classes, scores, or the slots of each answer's first and last token."""
    sequence_ids: Int64[np.ndarray, " N"]
    lengths: Int64[np.ndarray, " N"]

    def to(self, device: torch.device) -> "FinetuneBatch":
        """Moves the tensors."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class FinetuneCollator:
    """Lays out the packs of a micro-batch."""

    features: Features
    layout: Layout
    max_sequence_length: int
    """Slots of a pack and columns of a padded row."""
    padding_token: int

    def collate(self, packs: PackSelection) -> FinetuneBatch:
        """Returns the batch of these packs."""
        count = len(packs.sequence_ids)
        placement = self._placer(packs).place(packs, packs.lengths, np.ones(count, dtype=np.int64))
        sequence_of_token = np.repeat(np.arange(count), packs.lengths)
        token_of_sequence = np.arange(len(sequence_of_token)) - np.repeat(
            np.cumsum(packs.lengths) - packs.lengths, packs.lengths
        )
        source = self.features.starts[packs.sequence_ids][sequence_of_token] + token_of_sequence
        is_second = token_of_sequence >= self.features.first_lengths[packs.sequence_ids][sequence_of_token]
        starts = placement.slot_of_token[token_of_sequence == 0]

        def over_slots(values: Shaped[np.ndarray, " tokens"], filler: int) -> Int[Tensor, " T"]:
            slots = np.full(placement.slots, filler, dtype=np.int64)
            slots[placement.slot_of_token] = values
            return torch.from_numpy(slots)

        return FinetuneBatch(
            tokens=over_slots(self.features.tokens[source], self.padding_token),
            position_ids=torch.from_numpy(placement.position_ids),
            token_type_ids=over_slots(is_second, 0),
            cu_seqlens=torch.from_numpy(np.append(placement.segment_starts, placement.slots).astype(np.int32)),
            max_sequence_length=self.max_sequence_length,
            row_slots=placement.row_slots,
            position_rows=self.max_sequence_length,
            sequence_starts=torch.from_numpy(starts),
            sequence_of_slot=over_slots(sequence_of_token, count),
            labels=torch.from_numpy(self._labels(packs.sequence_ids, starts)),
            sequence_ids=packs.sequence_ids,
            lengths=packs.lengths,
        )

    def _labels(
        self, sequence_ids: Int64[np.ndarray, " N"], starts: Int64[np.ndarray, " N"]
    ) -> Shaped[np.ndarray, " N *parts"]:
        labels: Shaped[np.ndarray, " N *parts"] = self.features.labels[sequence_ids]
        return labels + starts[:, None] if labels.ndim == 2 else labels

    def _placer(self, packs: PackSelection) -> Placer:
        """Returns a placer with as many rows as there are packs: the last step of an epoch has fewer."""
        shape = StepShape(
            batching="packs",
            items_per_step=packs.packs,
            items_per_micro_batch=packs.packs,
            layout=self.layout,
            isolate=True,
            reset_positions=True,
            policy="arrival",
            cost_weights=CostWeights(per_token=0.0, per_squared_length=0.0, per_segment=0.0),
            balances_each_micro_batch=False,
        )
        return Placer(
            shape=shape,
            pack_length=self.max_sequence_length,
            max_sequence_length=self.max_sequence_length,
            is_bidirectional=True,
        )
