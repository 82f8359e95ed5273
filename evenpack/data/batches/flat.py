"""A batch as one block of memory, to pass it between processes: a shared file for each batch, and not for each tensor.

Taking a tensor from another process costs a connection and a mapping, however small it is, and a batch has a dozen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from evenpack.batch import PackedBatch

_ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: any type can be read there, by vector instructions too."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in the block a tensor is."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A dataclass or a dictionary without its tensors."""

    kind: type[Any]
    values: dict[Any, Any]
    """Fields or items: a `_Place` for each tensor, a `_Form` for a value that holds tensors, or the value itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBatch:
    """A `PackedBatch` whose tensors are parts of one."""

    block: UInt8[Tensor, " bytes"]
    form: _Form

    @classmethod
    def of(cls, batch: PackedBatch) -> "FlatBatch":
        """Returns the batch, copied into one block."""
        tensors = list(_tensors(batch))
        ends = [0]
        for tensor in tensors:
            ends.append(_aligned(ends[-1]) + tensor.nbytes)
        block = torch.empty(ends[-1], dtype=torch.uint8)
        begins = [_aligned(end) for end in ends[:-1]]
        for tensor, begin, end in zip(tensors, begins, ends[1:], strict=True):
            block[begin:end] = tensor.contiguous().view(-1).view(torch.uint8)
        places = (
            _Place(begin=begin, end=end, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for tensor, begin, end in zip(tensors, begins, ends[1:], strict=True)
        )
        return cls(block=block, form=_form(batch, places))

    def pin_memory(self) -> "FlatBatch":
        """Page-locks the block, and with it every tensor of the batch."""
        return replace(self, block=self.block.pin_memory())

    def batch(self) -> PackedBatch:
        """Returns the batch; its tensors share the block's memory."""
        batch = self._restored(self.form)
        assert isinstance(batch, PackedBatch), "made of one"
        return batch

    def _restored(self, part: Any) -> Any:
        if isinstance(part, _Place):
            return self.block[part.begin : part.end].view(part.dtype).view(part.shape)
        if isinstance(part, _Form):
            values = {name: self._restored(value) for name, value in part.values.items()}
            return values if part.kind is dict else part.kind(**values)  # keys of a mapping may be numbers
        return part


def _items(value: Any) -> dict[Any, Any] | None:
    """Returns the fields of a dataclass or the items of a mapping; None for what holds no tensors."""
    if isinstance(value, Mapping):
        return dict(value)
    return {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else None


def _tensors(holder: Any) -> Iterator[Tensor]:
    """Yields the tensors of a dataclass or mapping and of those that it holds, in the order of the fields."""
    for value in (_items(holder) or {}).values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)


def _form(holder: Any, places: Iterator[_Place]) -> Any:
    """Returns the form of a dataclass or mapping, whose tensors are at the places that follow; else the value."""
    if isinstance(holder, Tensor):
        return next(places)
    items = _items(holder)
    if items is None:
        return holder
    kind = dict if isinstance(holder, Mapping) else type(holder)
    return _Form(kind=kind, values={name: _form(value, places) for name, value in items.items()})


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
