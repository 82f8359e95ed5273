"""Memory that a kernel takes for itself while it runs: no operator returns it, and a trace of tensors would miss it.

FlashAttention 2 adds up the gradient of the queries in FP32, in rows that lie 128 further apart for each segment, empty
ones included, so that no segment's last block runs into the next. Source: `mha_varlen_bwd` of
`csrc/flash_attn/flash_api.cpp`, in flash-attn 2.8 and, with the same sizes, in PyTorch 2.11 to 2.13.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenpack.testing.fake_cuda.attention_operators import OPERATORS, by_name

_RETURNED = "flash_attn::_flash_attn_varlen_backward"
"""The one whose sums for each row are a result."""
_BACKWARD = {"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward", _RETURNED}
_ROWS_OF_A_SEGMENT = 128
_PROCESSORS = 132
"""Of an H100 and an H200: deterministic kernels add up as many parts as keep them busy."""
_FP32_BYTES = 4


def buffer_sizes(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the bytes of each buffer that the kernel of an operator makes and frees; () for those that make none."""
    name = operator._schema.name
    if name not in _BACKWARD:
        return ()
    given = by_name(operator, arguments, named)
    queries, keys, boundaries = (given[OPERATORS[name][part]] for part in (0, 1, 3))
    (slots, heads, width), segments = queries.shape, boundaries.shape[0] - 1
    rows = slots + _ROWS_OF_A_SEGMENT * segments
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
