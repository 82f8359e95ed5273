"""A batch as one block of memory, to pass it between processes: a shared file for each batch, and not for each tensor.

Taking a tensor from another process costs a connection and a mapping, however small it is, and a batch has a dozen.
"""

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from evenpack.batch import PackedBatch

_ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: any type can be read there, by vector instructions too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBatch:
    """A `PackedBatch` whose tensors are parts of one."""

    block: UInt8[Tensor, " bytes"]
    form: bytes
    """The batch pickled without its tensors, with the place of each in the block."""

    @classmethod
    def of(cls, batch: PackedBatch) -> "FlatBatch":
        """Returns the batch, copied into one block."""
        form = io.BytesIO()
        pickler = _Pickler(form, pickle.HIGHEST_PROTOCOL)
        pickler.dump(batch)
        block = torch.empty(pickler.end, dtype=torch.uint8)
        for begin, tensor in pickler.tensors:
            block[begin : begin + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        return cls(block=block, form=form.getvalue())

    def pin_memory(self) -> "FlatBatch":
        """Page-locks the block, and with it every tensor of the batch."""
        return replace(self, block=self.block.pin_memory())

    def batch(self) -> PackedBatch:
        """Returns the batch; its tensors share the block's memory."""
        batch = _Unpickler(self.form, self.block).load()
        assert isinstance(batch, PackedBatch), "made of one"
        return batch


class _Pickler(pickle.Pickler):
    """Pickles everything but tensors, which get places in a block, one after another."""

    end = 0
    """Bytes of the block so far."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.tensors: list[tuple[int, Tensor]] = []
        """Each tensor, with the byte of the block at which it begins."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        begin = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = begin + value.nbytes
        self.tensors.append((begin, value))
        return begin, self.end, tuple(value.shape), value.dtype


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote, with parts of the block as tensors."""

    def __init__(self, form: bytes, block: Tensor) -> None:
        super().__init__(io.BytesIO(form))
        self._block = block

    def persistent_load(self, place: Any) -> Tensor:
        begin, end, shape, dtype = place
        return self._block[begin:end].view(dtype).view(shape)
