"""Half-precision products whose matrices do not lie where cuBLAS's fast kernels can load them.

Tensor cores are used best if every line of each matrix, rows or columns, begins at a multiple of 16 bytes. Others are
allowed and compute the same, by a slower kernel, and nothing says so.

Source: NVIDIA, cuBLAS library, section "Tensor Core Usage" (conditions on pointers and leading dimensions).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes."""

LEAST_OPERATIONS = 1 << 25
"""Smaller products are left alone, such as BERT's classifier of two classes: to start one takes longer than it does."""

PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.addmm_,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.baddbmm_,
}
"""Operators that cuBLAS computes; their last two tensors are the factors."""


def unaligned_matrix(packet: Any, arguments: Sequence[Any], result: Any) -> str | None:
    """Returns which matrix of a large half-precision product is not aligned, and how it lies; None if all are.

    Args:
        packet: the operator; one other than a product has no such matrix.
        arguments: its positional arguments: factors of shape (..., M, K) and (..., K, N).
        result: (..., M, N).
    """
    if packet not in PRODUCTS:
        return None
    left, right = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
    if 2 * prod(result.shape) * left.shape[-1] < LEAST_OPERATIONS:
        return None
    for name, matrix in (("left factor", left), ("right factor", right), ("result", result)):
        if not _is_aligned(matrix):
            shape, strides = tuple(matrix.shape), tuple(matrix.stride())
            return f"the {name} {shape} has strides {strides} from {matrix.storage_offset()}: no multiples of 16 bytes"
    return None


def _is_aligned(matrix: Tensor) -> bool:
    """Returns whether each line begins at a multiple of 16 bytes; storages do on a GPU."""
    if matrix.element_size() != 2:
        return True
    steps = [stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1 and stride != 1]
    return all(step * matrix.element_size() % ALIGNMENT == 0 for step in (*steps, matrix.storage_offset()))
