"""How much memory of the device fake tensors would take, and when it is most."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

BLOCK_BYTES = 512
"""The CUDA allocator hands out multiples of this."""


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages on the device that operators make within the context, while they live.

    Torch's `MemTracker` finds the same peak, and a breakdown for each module that takes minutes for a large model.
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
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self._recent_bytes = max(self._recent_bytes, self.current_bytes)

    def recent_peak(self) -> int:
        """Returns the peak since the last call."""
        recent, self._recent_bytes = self._recent_bytes, self.current_bytes
        return recent

    def restart(self) -> None:
        """Forgets the peak."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = operator(*arguments, **(named or {}))
        self.count(leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor))
        return result

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage: torch.UntypedStorage = tensor.untyped_storage()
        if storage in self._sizes:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._sizes[storage] = size
        self.current_bytes += size
        weakref.finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.current_bytes -= size
