"""How much memory of the device fake tensors would take, and when it is most."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from evenpack.testing.fake_cuda.kernel_buffers import buffer_sizes

BLOCK_BYTES = 512
"""The CUDA allocator hands out multiples of this."""


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages on the device that operators make within the context, while they live.

    Buffers that a kernel holds while it runs belong to the peak. Torch's `MemTracker`, which does not know them, finds
    the same peak outside attention, and a breakdown for each module that takes minutes for a large model.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: Any = WeakIdKeyDictionary()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._recent_bytes = 0

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were made before."""
        for tensor in tensors:
            self._count(tensor)
        self._note(0)

    def recent_peak(self) -> int:
        """Returns the peak since the last call."""
        recent, self._recent_bytes = self._recent_bytes, self.current_bytes
        return recent

    def restart(self) -> None:
        """Forgets the peak."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = operator(*arguments, **named)
        self.count(leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor))
        if isinstance(operator, OpOverload):
            self._note(sum(_allocated(size) for size in buffer_sizes(operator, arguments, named)))
        return result

    def _note(self, buffers: int) -> None:
        """Notes a moment at which kernels hold buffers of so many bytes beside the tensors."""
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + buffers)
        self._recent_bytes = max(self._recent_bytes, self.current_bytes + buffers)

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage: torch.UntypedStorage = tensor.untyped_storage()
        if storage in self._sizes:
            return
        size = _allocated(storage.nbytes())
        self._sizes[storage] = size
        self.current_bytes += size
        weakref.finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.current_bytes -= size


def _allocated(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
