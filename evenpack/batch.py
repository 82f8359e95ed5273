"""The one value that the data side hands to the model side.

Shapes: T = slots of the micro-batch, S = segments it can hold.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What one whole step holds over all ranks; every rank computes it from the plan, without communication."""

    packs: int
    sequences: int
    tokens: int
    """Real tokens, padding left out."""
    targets: int
    """Positions that count in the loss: its denominator."""

    def __add__(self, other: "StepCounts") -> "StepCounts":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return StepCounts(**sums)


@dataclass(frozen=True, kw_only=True)
class CausalTargets:
    """Next-token targets: one per slot, weight 0 where a slot predicts nothing.

    The last token of a segment and all padding have weight 0 and label 0.
    """

    labels: Int[Tensor, " T"]
    weights: Float[Tensor, " T"]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "CausalTargets":
        return CausalTargets(
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "CausalTargets":
        return CausalTargets(labels=self.labels.pin_memory(), weights=self.weights.pin_memory())


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of one rank.

    A segment is what attends to itself. `cu_seqlens` has a fixed size S + 1 and ends in empty segments; the
    padding at the end of a pack is a segment of its own that nothing else sees.
    """

    tokens: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    cu_seqlens: Int[Tensor, " S_plus_1"]
    """int32, from 0 to T, never falling."""
    max_sequence_length: int
    """Upper bound of a segment's length, the same for each batch of a run, so that shapes stay static."""
    targets: CausalTargets
    step_counts: StepCounts
    """Of the whole step over all ranks: the loss denominators."""
    local_counts: StepCounts
    """Of this micro-batch."""
    sequence_ids: Int[Tensor, " N"]
    """Ids within their sources, in slot order, filled up with -1 to a fixed size."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source in this micro-batch, in the mixture's order."""
    squared_lengths: int
    """Sum of length² over real segments: what attention really has to compute."""
    order_hash: int
    """Sum mod 2**64 of hash(source, pack, slot, sequence id) over the sequences collated here."""

    def __post_init__(self) -> None:
        slots = self.tokens.shape[0]
        for name in ("tokens", "position_ids"):
            if getattr(self, name).shape != (slots,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, expected ({slots},)")
        if self.targets.labels.shape != (slots,) or self.targets.weights.shape != (slots,):
            raise ValueError(f"targets have shape {tuple(self.targets.labels.shape)}, expected ({slots},)")
        if self.cu_seqlens.dtype != torch.int32:
            raise ValueError(f"cu_seqlens has dtype {self.cu_seqlens.dtype}, expected torch.int32")

    @property
    def slots(self) -> int:
        """All positions, padding included."""
        return self.tokens.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Moves the tensors the model reads to `device`; the ids stay where they are."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "PackedBatch":
        """Page-locks what will be moved, so that the copy to the device does not wait."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
            targets=self.targets.pin_memory(),
        )
