"""`PackedBatch`, the value that the data side gives to the model side.

Shapes: T = slots of the micro-batch, S = segments it has room for, N = sequences, M = masked tokens. S, N and M are
what it needs, rounded up to a multiple of 64. T is fixed, except in the un-padded layout and where the rows of a
rectangle are the sequences of packs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from typing_extensions import TypeVar

from evenpack.losses import NEXT_SENTENCE, NEXT_TOKEN, StepCounts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@runtime_checkable
class Array(Protocol):
    """What a batch itself asks of its arrays."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


if TYPE_CHECKING:
    A = TypeVar("A", bound=Array, default=Tensor)
else:  # only type checkers need the default, and it would load torch
    A = TypeVar("A", bound=Array)
"""The arrays of a batch: `torch.Tensor`, or `numpy.ndarray` as it is collated; only tensors need torch."""


@dataclass(frozen=True, kw_only=True)
class SlotTargets(Generic[A]):
    """A label for every slot, with weight 0 and label 0 where a slot predicts nothing, as all padding."""

    labels: Int[A, " T"]
    weights: Float[A, " T"]


@dataclass(frozen=True, kw_only=True)
class ChosenTargets(Generic[A]):
    """Labels of K chosen slots: K is a multiple of 64, and unused entries have position 0, label 0 and weight 0.

    A loss is the sum of the targets' losses times these weights: 1 each for a mean over targets, 1 / (targets of the
    sequence) each for a mean over sequences of each sequence's mean.
    """

    positions: Int[A, " K"]
    """The slots at which something is predicted, in slot order."""
    labels: Int[A, " K"] | Float[A, " K"]
    """Classes, or numbers to predict."""
    weights: Float[A, " K"]


Targets = SlotTargets[A] | ChosenTargets[A]


@dataclass(frozen=True, kw_only=True)
class PackedBatch(Generic[A]):
    """One micro-batch of one rank.

    A segment is a range of slots that attends only to itself. `cu_seqlens` ends in empty segments, so that S is a
    multiple of 64; the padding at the end of a pack is a separate segment, to which no other attends.
    """

    tokens: Int[A, " T"]
    position_ids: Int[A, " T"]
    token_type_ids: Int[A, " T"]
    """The half of its pair to which each token belongs; zeros where there are no pairs."""
    cu_seqlens: Int[A, " S_plus_1"]
    """Starts of the segments, and their end: int32, from 0 to T, never decreasing."""
    max_sequence_length: int
    """Upper bound of a segment's length, the same for each batch of a run, so that compiled code is."""
    row_slots: int
    """Slots of a row: a divisor of T, and no segment crosses the end of a row. T in the un-padded layout."""
    position_rows: int
    """Bound above all `position_ids`: the rows that a table of positions needs. The same for each batch of a run."""
    targets: Mapping[str, Targets[A]]
    """The targets of each loss that can be learned from this data, by name (`evenpack.losses`), the main one first.

    next_token      the next token of every slot, in its segment
    masked_token    the tokens before masking, at M chosen slots
    next_sentence   at the first slot of each of N pairs: 0 if its second half follows the first, 1 if it does not
    sequence_class  at the first slot of each of N sequences: its class
    sequence_score  at the first slot of each of N sequences: its score
    answer_span     at the first and the last slot of the answer in each of N sequences: 0 and 1, of weight 1/2 each
    """
    step_counts: StepCounts
    """Counts of the whole step over all ranks: the loss denominators."""
    local_counts: StepCounts
    """Counts of this micro-batch."""
    sequence_ids: Int[A, " N"]
    """Ids within their sources, in slot order, padded with -1 to a multiple of 64."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source in this micro-batch, in the mixture's order."""
    squared_lengths: int
    """Sum of length² over real segments, without those that only pad: the attention that is really needed."""
    pairs_within: Mapping[int, int]
    """For each window of the model's layers, the pairs of tokens of one such segment that are at most so far apart."""
    cost: float
    """Cost of this micro-batch to its rank in the plan of its step (`data/order/step_plan.py`); 0 without a plan."""
    order_hash: int
    """Sum mod 2**64 of hash(source, pack, slot, sequence id) over the sequences collated here."""

    def __post_init__(self) -> None:
        _check_shapes(self, ("position_ids", "token_type_ids"), self.slots)
        sizes = {NEXT_TOKEN.name: self.slots, NEXT_SENTENCE.name: self.sequence_ids.shape[0]}
        for name, targets in self.targets.items():
            size = sizes.get(name, targets.weights.shape[0])
            _check_shapes(targets, _fields_of(targets), size, of=f"{name}: ")
        if self.slots % self.row_slots:
            raise ValueError(f"rows of {self.row_slots} slots do not divide {self.slots} slots")
        dtype = getattr(self.cu_seqlens, "dtype", None)
        if dtype != np.int32 and str(dtype) != "torch.int32":
            raise ValueError(f"cu_seqlens has dtype {dtype}, expected int32")

    @property
    def slots(self) -> int:
        """Number of all positions, padding included."""
        return self.tokens.shape[0]

    @property
    def moved_tensors(self) -> tuple[A, ...]:
        """The tensors that `to` moves."""
        read = [getattr(self, name) for name in _READ_BY_THE_MODEL]
        targets = [getattr(each, name) for each in self.targets.values() for name in _fields_of(each)]
        return (*read, *targets)

    @property
    def head_rows(self) -> int:
        """Rows at which the output head computes: of the main loss, unused ones included."""
        return next(iter(self.targets.values())).labels.shape[0]

    @property
    def moved_bytes(self) -> int:
        """Number of bytes of the tensors that `to` moves."""
        return sum(tensor.nbytes for tensor in self.moved_tensors)

    def to(self: "PackedBatch", device: "torch.device | str", *, non_blocking: bool = False) -> "PackedBatch":
        """Moves the tensors that the model reads to `device`; the ids are not moved."""
        return self.with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: "PackedBatch") -> "PackedBatch":
        """Page-locks the tensors that will be moved, so that the copy to the device does not wait."""
        return self.with_tensors(lambda tensor: tensor.pin_memory())

    def with_tensors(self: "PackedBatch", change: "Callable[[Tensor], Tensor]") -> "PackedBatch":
        """Returns the batch with each tensor that the model reads after `change`."""
        return _mapped(self, change, _READ_BY_THE_MODEL)

    def tensors(self: "PackedBatch[np.ndarray]") -> "PackedBatch":
        """Returns a batch of numpy arrays as one of torch tensors that share their memory."""
        from torch import from_numpy

        return _mapped(self, from_numpy, (*_READ_BY_THE_MODEL, "sequence_ids"))


_READ_BY_THE_MODEL = ("tokens", "position_ids", "token_type_ids", "cu_seqlens")
"""Fields that the model reads, besides the targets."""


def _fields_of(targets: Targets[Any]) -> tuple[str, ...]:
    return tuple(targets.__dataclass_fields__)


def _check_shapes(holder: Any, names: tuple[str, ...], size: int, *, of: str = "") -> None:
    for name in names:
        shape = tuple(getattr(holder, name).shape)
        if shape != (size,):
            raise ValueError(f"{of}{name} has shape {shape}, expected ({size},)")


def _mapped(batch: Any, change: Callable[[Any], Any], names: tuple[str, ...]) -> PackedBatch:
    """Returns the batch with the named fields, and all of its targets, after `change`."""
    targets = {
        name: replace(each, **{field: change(getattr(each, field)) for field in _fields_of(each)})
        for name, each in batch.targets.items()
    }
    changed: PackedBatch = replace(batch, **{name: change(getattr(batch, name)) for name in names}, targets=targets)
    return changed
