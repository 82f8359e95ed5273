"""How much memory fake tensors would take on the device, and when it peaks.

A kernel may take memory for itself while it runs, which no operator returns and a trace of tensors would miss.
FlashAttention 2 adds up the gradient of the queries in FP32, in rows that lie 128 further apart for each segment, empty
ones included, so that no segment's last block runs into the next. Source: `mha_varlen_bwd` of
`csrc/flash_attn/flash_api.cpp`, in flash-attn 2.8 and, with the same sizes, in PyTorch 2.11 to 2.13. FlashAttention 4
does likewise, and keeps two numbers for each row (`_flash_attn_bwd` of `flash_attn/cute/interface.py`, 4.0.0b36).
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from fake_gpu.attention_operators import by_name, tensors_of

_RETURNED = "flash_attn::_flash_attn_varlen_backward"
"""The one whose sums for each row are a result."""
_FOURTH = "evenpack::flash_attention_4_backward"
_BACKWARD = {_FOURTH, "torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward", _RETURNED}
_ROWS_OF_A_SEGMENT = 128
_PROCESSORS = 132
"""Multiprocessors of an H100 or H200: deterministic kernels add up as many parts as keep them busy."""
_FP32_BYTES = 4


def buffer_sizes(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the bytes of each buffer that the kernel of an operator makes and frees; () for those that make none."""
    name = operator._schema.name
    if name not in _BACKWARD:
        return ()
    given = by_name(operator, arguments, named)
    queries, keys, _, boundaries, _ = tensors_of(name, given)
    (slots, heads, width), segments = queries.shape, boundaries.shape[0] - 1
    rows = slots + _ROWS_OF_A_SEGMENT * segments
    if name == _FOURTH:
        shared = 2 * keys.shape[1] if keys.shape[1] != heads else 0
        return (_FP32_BYTES * rows * ((heads + shared) * _rounded(width) + 2 * heads),)
    parts = 1
    if given.get("deterministic", torch.are_deterministic_algorithms_enabled()):
        parts = -(-_PROCESSORS // (segments * heads))
    gradient_of_queries = _FP32_BYTES * parts * rows * heads * _rounded(width)
    sums = () if name == _RETURNED else (_FP32_BYTES * rows * heads,)
    return (gradient_of_queries, *sums, *_repeated(queries, keys))


def _rounded(width: int) -> int:
    """Returns the channels of a head that the kernel computes with."""
    return -(-width // 32) * 32 if width <= 192 else 256


def _repeated(queries: Tensor, keys: Tensor) -> tuple[int, ...]:
    """Returns the gradients of keys and values for each head, where several heads share them."""
    return () if keys.shape[1] == queries.shape[1] else 2 * (queries.numel() * queries.element_size(),)


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
