"""The one value that the data side hands to the model side.

Shapes: T = slots of the micro-batch, S = segments it can hold, N = sequences it can hold, M = masked tokens it can
hold. All but T of the un-packed layouts are fixed for a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class ModelInputs(Protocol):
    """What a model reads of a batch to compute activations, whatever it is asked for then; see `PackedBatch`."""

    @property
    def tokens(self) -> Int[Tensor, " T"]: ...

    @property
    def position_ids(self) -> Int[Tensor, " T"]: ...

    @property
    def token_type_ids(self) -> Int[Tensor, " T"]: ...

    @property
    def cu_seqlens(self) -> Int[Tensor, " S_plus_1"]: ...

    @property
    def max_sequence_length(self) -> int: ...

    @property
    def position_rows(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What one whole step holds over all ranks; every rank computes it from the plan, without communication."""

    packs: int
    sequences: int
    tokens: int
    """Real tokens, padding left out."""
    targets: int
    """Tokens to be predicted: next tokens, or masked ones."""

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

    def check(self, slots: int, sequences: int) -> None:
        """Raises: ValueError unless the shapes fit a batch of `slots` slots."""
        _check_shapes(self, ("labels", "weights"), slots)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "CausalTargets":
        return replace(self, **_mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> "CausalTargets":
        return replace(self, **_mapped(self, Tensor.pin_memory))


@dataclass(frozen=True, kw_only=True)
class MaskedTargets:
    """Masked tokens, and for each sequence whether its second half follows its first.

    Sizes are fixed; what is filled up has position 0, label 0 and weight 0. A weight is a share in a sum: one each
    for the mean over tokens, 1 / (masked tokens of its sequence) each for the mean over sequences of their means.
    """

    positions: Int[Tensor, " M"]
    """Slots whose token is to be predicted."""
    labels: Int[Tensor, " M"]
    """Tokens that stood there before masking."""
    weights: Float[Tensor, " M"]
    sequence_starts: Int[Tensor, " N"]
    """Slot of each sequence's first token, in slot order."""
    next_sentence_labels: Int[Tensor, " N"]
    """0: the second half follows the first in its document; 1: it comes from elsewhere."""
    sequence_weights: Float[Tensor, " N"]

    def check(self, slots: int, sequences: int) -> None:
        """Raises: ValueError unless the shapes fit one another and a batch of `sequences` sequence ids."""
        _check_shapes(self, ("labels", "weights"), self.positions.shape[0])
        _check_shapes(self, ("sequence_starts", "next_sentence_labels", "sequence_weights"), sequences)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MaskedTargets":
        return replace(self, **_mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> "MaskedTargets":
        return replace(self, **_mapped(self, Tensor.pin_memory))


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch of one rank.

    A segment is what attends to itself. `cu_seqlens` has a fixed size S + 1 and ends in empty segments; the
    padding at the end of a pack is a segment of its own that nothing else sees.
    """

    tokens: Int[Tensor, " T"]
    position_ids: Int[Tensor, " T"]
    token_type_ids: Int[Tensor, " T"]
    """Which half of its pair a token is of; zeros where there are no pairs."""
    cu_seqlens: Int[Tensor, " S_plus_1"]
    """int32, from 0 to T, never falling."""
    max_sequence_length: int
    """Upper bound of a segment's length, the same for each batch of a run, so that shapes stay static."""
    position_rows: int
    """`position_ids` are below it: what a table of positions must have. The same for each batch of a run."""
    targets: CausalTargets | MaskedTargets
    step_counts: StepCounts
    """Of the whole step over all ranks: the loss denominators."""
    local_counts: StepCounts
    """Of this micro-batch."""
    sequence_ids: Int[Tensor, " N"]
    """Ids within their sources, in slot order, filled up with -1 to a fixed size."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source in this micro-batch, in the mixture's order."""
    squared_lengths: int
    """Sum of length² over real segments, what only fills them up left out: what attention really has to compute."""
    padding_targets: int
    """Targets of this micro-batch that only fill sequences up, and are predicted all the same."""
    order_hash: int
    """Sum mod 2**64 of hash(source, pack, slot, sequence id) over the sequences collated here."""

    def __post_init__(self) -> None:
        _check_shapes(self, ("position_ids", "token_type_ids"), self.slots)
        self.targets.check(self.slots, self.sequence_ids.shape[0])
        if self.cu_seqlens.dtype != torch.int32:
            raise ValueError(f"cu_seqlens has dtype {self.cu_seqlens.dtype}, expected torch.int32")

    @property
    def slots(self) -> int:
        """All positions, padding included."""
        return self.tokens.shape[0]

    @property
    def moved_bytes(self) -> int:
        """Of the tensors that `to` moves."""
        moved = [getattr(self, name) for name in _READ_BY_THE_MODEL]
        moved += [getattr(self.targets, field.name) for field in fields(self.targets)]
        return sum(tensor.nbytes for tensor in moved)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Moves the tensors the model reads to `device`; the ids stay where they are."""
        moved = _mapped(self, lambda tensor: tensor.to(device, non_blocking=non_blocking), _READ_BY_THE_MODEL)
        return replace(self, targets=self.targets.to(device, non_blocking=non_blocking), **moved)

    def pin_memory(self) -> "PackedBatch":
        """Page-locks what will be moved, so that the copy to the device does not wait."""
        return replace(self, targets=self.targets.pin_memory(), **_mapped(self, Tensor.pin_memory, _READ_BY_THE_MODEL))


_READ_BY_THE_MODEL = ("tokens", "position_ids", "token_type_ids", "cu_seqlens")
"""Of a batch, beside its targets."""


def _check_shapes(holder: Any, names: tuple[str, ...], size: int) -> None:
    for name in names:
        shape = tuple(getattr(holder, name).shape)
        if shape != (size,):
            raise ValueError(f"{name} has shape {shape}, expected ({size},)")


def _mapped(holder: Any, change: Callable[[Tensor], Tensor], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The named fields, or all, each put through `change`."""
    return {name: change(getattr(holder, name)) for name in names or [field.name for field in fields(holder)]}
