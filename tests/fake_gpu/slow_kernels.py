"""Half-precision products, and operators over lists of tensors, for which a GPU would take a slow kernel.

Products: tensor cores are used best if every line of each matrix, rows or columns, begins at a multiple of 16 bytes
and is as long. Others compute the same by a slower kernel, and nothing says so. Source: NVIDIA, cuBLAS library, section
"Tensor Core Usage" (conditions on pointers and leading dimensions). The length of a line was measured: lines of 50,257
numbers at multiples of 16 bytes have 97 to 500 of an H100's 790 TFLOP/s (docs/studies/one_h100.md).

Lists of tensors take a few kernels for all of them, or a kernel for each. The rules are taken from PyTorch 2.11 to 2.13
for CUDA: `can_use_fast_route` of `ATen/native/ForeachUtils.h`, and one more of
`ATen/native/cuda/ForeachPointwiseOp.cu`: the first factors of `addcmul`, or the dividends of `addcdiv`, may be tensors
without dimensions, which `PointwiseOpScalar0dTensorFunctor` reads on the device
(https://github.com/pytorch/pytorch/pull/172731). A list of second factors without dimensions is not relied upon.
Integers, for which some operators have rules of their own, are not followed.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fake_gpu.attention_operators import by_name

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
            start = matrix.storage_offset()
            return f"the {name} {shape} has strides {strides} from {start}: not all lines are multiples of 16 bytes"
    return None


def _is_aligned(matrix: Tensor) -> bool:
    """Returns whether each line begins at a multiple of 16 bytes, as storages do on a GPU, and is as long."""
    if matrix.element_size() != 2:
        return True
    axes = [(size, stride) for size, stride in zip(matrix.shape, matrix.stride(), strict=True) if size > 1]
    numbers = [size if stride == 1 else stride for size, stride in axes]
    return all(number * matrix.element_size() % ALIGNMENT == 0 for number in (*numbers, matrix.storage_offset()))


_SCALED = {"_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_"}
_CONVERTING = {"_foreach_copy", "_foreach_copy_"}


def slow_path(operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Returns why an operator over lists of more than one tensor takes a kernel for each; None where it does not."""
    name = operator._schema.name.removeprefix("aten::")
    if not name.startswith("_foreach_"):
        return None
    given = list(by_name(operator, arguments, named).values())
    lists = [value for value in given if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)]
    first = lists[0]
    if len(first) == 1:
        return None
    scalars = [value for value in given if isinstance(value, Tensor)]
    if name in _SCALED and operator._overloadname == "Scalar" and all(factor.dim() == 0 for factor in lists[1]):
        scalars += lists.pop(1)
    tensors = [tensor for one in lists for tensor in one]
    dtypes = {tensor.dtype for tensor in (*(first if name in _CONVERTING else tensors), *scalars)}
    rules = {
        "tensors are on several devices": len({tensor.device for tensor in (*tensors, *scalars)}) == 1,
        "tensors have several types": len(dtypes) == 1,
        "a tensor has gaps or overlaps itself": all(_is_dense(tensor) for tensor in tensors),
        "tensors that belong together differ in shape or in strides": all(
            _lie_alike(*together) for together in zip(*lists, strict=True)
        ),
    }
    broken = [rule for rule, is_kept in rules.items() if not is_kept]
    return f"a kernel for each of {len(first):,} tensors: {'; '.join(broken)}" if broken else None


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the numbers fill one range of memory, each of its places once, in any order of dimensions."""
    inner = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != inner:
            return False
        inner *= size
    return True


def _lie_alike(first: Tensor, *others: Tensor) -> bool:
    """Returns whether tensors have one shape, and one stride for each dimension of more than one number."""
    return all(
        other.shape == first.shape
        and all(
            size == 1 or mine == its
            for size, mine, its in zip(first.shape, first.stride(), other.stride(), strict=True)
        )
        for other in others
    )
