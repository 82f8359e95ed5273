"""What the fake device takes for slow, rule by rule; traced steps are held to these rules as a whole."""

import pytest
import torch
import torch.nn.attention.varlen  # declares operators that are asked for here
from fake_gpu.memory import buffer_sizes
from fake_gpu.slow_kernels import LEAST_OPERATIONS, slow_path, unaligned_matrix
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evenpack.engine.optimizers.lamb import Lamb

aten = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers that nothing reads; operators are judged by what lies where."""
    return torch.empty(shape, dtype=dtype, device="meta")


def lists(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [numbers(*shape, dtype=dtype) for shape in shapes]


SHAPES = ((4, 3), (5,))
SINGLE = [(), ()]


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        (numbers(512, 256), numbers(256, 512), None),
        (numbers(256, 512).T, numbers(512, 256).T, None),
        (numbers(512, 257), numbers(257, 512), "left factor"),
        (numbers(512, 264)[:, :257], numbers(257, 512), "left factor"),
        (numbers(513, 256), numbers(256, 512), None),
        (numbers(512, 256), numbers(512, 264)[:257, :256].T, "result"),
        (numbers(512, 258)[:, :256], numbers(256, 512), "left factor"),
        (numbers(512, 264)[:, 4:260], numbers(256, 512), "left factor"),
        (numbers(512, 256), numbers(520, 264)[:, :256].T, None),
        (numbers(512, 256), numbers(512, 260)[:, :256].T, "right factor"),
        (numbers(512, 256), numbers(514, 256).T, "result"),
    ],
)
def test_lines_of_a_product_begin_at_multiples_of_16_bytes_and_are_as_long(
    left: Tensor, right: Tensor, found: str | None
) -> None:
    problem = unaligned_matrix(aten.mm, (left, right), left @ right)
    assert problem is None if found is None else str(problem).startswith(f"the {found} ")


def test_the_last_two_tensors_of_addmm_are_its_factors_and_batches_are_aligned() -> None:
    bias, left, right = numbers(512), numbers(512, 257), numbers(257, 512)
    assert unaligned_matrix(aten.addmm, (bias, left, right), left @ right) is not None
    several = numbers(4, 512 * 256 + 4)[:, : 512 * 256].view(4, 512, 256)
    assert unaligned_matrix(aten.bmm, (several, numbers(4, 256, 512)), numbers(4, 512, 512)) is not None


def test_small_products_full_precision_and_other_operators_are_left_alone() -> None:
    rows = LEAST_OPERATIONS // (2 * 1024 * 2)
    classes = numbers(1024, 2)
    assert unaligned_matrix(aten.mm, (numbers(rows - 1, 1024), classes), numbers(rows - 1, 2)) is None
    assert unaligned_matrix(aten.mm, (numbers(rows, 1024), classes), numbers(rows, 2)) is not None
    wide = numbers(512, 257, dtype=torch.float32)
    assert unaligned_matrix(aten.mm, (wide, wide.T), wide @ wide.T) is None
    assert unaligned_matrix(aten.add, (numbers(512, 257), 1), numbers(512, 257)) is None


@pytest.mark.parametrize(
    ("operator", "arguments", "found"),
    [
        (aten._foreach_add_.Scalar, (lists(*SINGLE), 1.0), None),
        (aten._foreach_add_.List, (lists(*SHAPES), lists(*SHAPES)), None),
        (aten._foreach_add_.List, ([numbers(4, 3), numbers(5)], [numbers(3, 4).T, numbers(5)]), "shape or in strides"),
        (aten._foreach_add_.List, (lists(*SHAPES), lists(*SHAPES, dtype=torch.bfloat16)), "several types"),
        (aten._foreach_copy_.default, (lists(*SHAPES), lists(*SHAPES, dtype=torch.bfloat16)), None),
        (aten._foreach_add_.List, (lists(*SHAPES), [torch.empty(4, 3), torch.empty(5)]), "several devices"),
        (aten._foreach_mul_.List, (lists((4, 3)), lists(())), None),
        (aten._foreach_mul_.Tensor, (lists(*SHAPES), numbers(dtype=torch.float64)), "several types"),
        (aten._foreach_norm.Scalar, ([numbers(4, 3)[:, :2], numbers(5)],), "has gaps"),
        (aten._foreach_norm.Scalar, ([numbers(3).expand(4, 3), numbers(5)],), "overlaps"),
        (aten._foreach_addcmul_.Scalar, (lists(*SHAPES), lists(*SINGLE), lists(*SHAPES)), None),
        (aten._foreach_addcmul_.Scalar, (lists(*SHAPES), lists(*SHAPES), lists(*SINGLE)), "shape or in strides"),
        (
            aten._foreach_addcmul_.ScalarList,
            (lists(*SHAPES), lists(*SINGLE), lists(*SHAPES), [1.0, 2.0]),
            "shape or in strides",
        ),
        (aten.add_.Tensor, (numbers(4, 3), numbers(3)), None),
    ],
)
def test_lists_of_tensors_have_one_kernel_where_they_lie_alike(operator, arguments, found) -> None:
    problem = slow_path(operator, arguments, {})
    assert problem is None if found is None else found in str(problem)


class SlowLists(TorchDispatchMode):
    """Notes what lists of tensors would take a kernel for each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.found.append(slow_path(operator, arguments, named or {}))
        return operator(*arguments, **(named or {}))


@pytest.mark.parametrize("fused", [False, True])
def test_lamb_has_no_kernel_for_each_matrix(fused: bool) -> None:
    apart, merged = ([torch.nn.Parameter(torch.ones(6, width)) for width in (3, 2)] for _ in range(2))
    for parameter in (*apart, *merged):
        parameter.grad = torch.ones_like(parameter)
    groups = [{"params": apart}, {"params": merged, "parts": (4, 2)}]
    with SlowLists() as lists_of_step:
        Lamb(groups, lr=0.1, fused=fused).step()
    assert set(lists_of_step.found) == {None}


BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default


def backward_of(*, slots: int, heads: int, width: int, key_heads: int, segments: int) -> tuple[object, ...]:
    """Arguments of attention's backward pass."""
    queries, keys = numbers(slots, heads, width), numbers(slots, key_heads, width)
    sums, borders = numbers(heads, slots, dtype=torch.float32), numbers(segments + 1, dtype=torch.int32)
    return (queries, queries, keys, keys, queries, sums, borders, borders, 512, 512, False, borders)


@pytest.mark.parametrize(("width", "computed", "key_heads"), [(64, 64, 4), (80, 96, 4), (200, 256, 4), (64, 64, 2)])
def test_buffers_of_attention_have_128_rows_for_each_segment_and_whole_heads(
    width: int, computed: int, key_heads: int
) -> None:
    slots, heads, segments = 1000, 4, 7
    given = backward_of(slots=slots, heads=heads, width=width, key_heads=key_heads, segments=segments)
    rows = slots + 128 * segments
    repeated = 2 * [2 * slots * heads * width] if key_heads < heads else []
    assert list(buffer_sizes(BACKWARD, given, {})) == [4 * rows * heads * computed, 4 * rows * heads, *repeated]


def test_a_deterministic_kernel_adds_up_as_many_parts_as_keep_the_device_busy() -> None:
    given = backward_of(slots=100, heads=4, width=64, key_heads=4, segments=2)
    once, sums = buffer_sizes(BACKWARD, given, {})
    torch.use_deterministic_algorithms(True)
    try:
        assert buffer_sizes(BACKWARD, given, {}) == (17 * once, sums)  # 132 processors, 8 heads of segments
    finally:
        torch.use_deterministic_algorithms(False)
