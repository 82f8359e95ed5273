"""Lays out the sequences of a task for the encoder, packed, un-padded or padded.

Shapes: T = slots, S = segments, N = sequences of the batch.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from evenpack.data.batches.placement import Placer
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import CostWeights, Layout, StepShape
from evenpack.finetuning.features import Features


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
