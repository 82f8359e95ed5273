"""The operations, bytes and kernels of forward and backward over a micro-batch, as traces of the model give them.

They describe the code without `torch.compile`: FP32 parameters, bfloat16 autocast, no activation
checkpointing, an attention kernel that keeps no scores. Every operator is one kernel that reads its inputs from
memory and writes its results there; caches are left out. Each kind of kernel has a second count: what would remain of
it if it were fused with its neighbours.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import numpy as np

from evenpack.kernels.costs import KernelTraffic, loss_other_traffic, loss_product_traffic, loss_products
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import PASSES, Work, attention_flops, model_products, model_sizes
from evenpack.models.trace import AXES, Factors, Passes, TracedKernel, TracedPart, at_two_depths, trace_passes
from evenpack.units import BF16_BYTES, FP32_BYTES

Part = Literal[TracedPart, "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)

_OF_BLOCKS = ("norms and sums", "projections", "attention", "feed-forward")

Fusion = Literal["compiled blocks", "fused head", "BF16 weights", "fused update"]
"""compiled blocks: one kernel for each chain of element-wise operators between two products (`torch.compile`). fused
head: logits stay BF16, and one kernel makes their gradient of them. BF16 weights: the optimizer writes the copies
that products read, and products add to FP32 gradients. fused update: gradients lie in one buffer, and one kernel
clips and updates."""
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)

_BOOKKEEPING = 14
"""Operators that copy the batch to the device, scale the loss and collect sums."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """All kernels of one kind."""

    part: Part
    kernels: int
    bytes: int
    """Bytes read and written."""
    flops: int = 0
    """Operations of matrix products, by the conventions of `cost.py`; in attention, useful ones."""
    fusion: Fusion | None = None
    """The fusion that would reduce them; None: no fusion of this module."""
    fused_kernels: int = 0
    """Kernels that remain with the fusion."""
    fused_bytes: int = 0

    def times(self, count: int) -> "Operation":
        """Returns the same kernels so many times."""
        return replace(
            self,
            kernels=count * self.kernels,
            bytes=count * self.bytes,
            flops=count * self.flops,
            fused_kernels=count * self.fused_kernels,
            fused_bytes=count * self.fused_bytes,
        )

    def under(self, fusions: frozenset[Fusion]) -> "Operation":
        """Returns the kernels that remain where these fusions are made."""
        if self.fusion not in fusions:
            return self
        return Operation(part=self.part, kernels=self.fused_kernels, bytes=self.fused_bytes, flops=self.flops)


def gradient_operations(config: TransformerConfig, *, vocabulary_size: int, work: Work) -> list[Operation]:
    """Returns what forward and backward over a micro-batch of this work do; gradients are not added up."""
    sizes = np.array([1, work.slots, work.head_slots, work.sequences])
    of_attention = attention_flops(model_products(config, vocabulary_size=vocabulary_size), work)
    found = []
    for kind, total in _totals(config, vocabulary_size=vocabulary_size).items():
        is_attention = kind.part == "attention" and kind.is_product
        found.append(
            Operation(
                part=kind.part,
                kernels=total.kernels,
                bytes=int(total.bytes @ sizes),
                flops=PASSES * of_attention if is_attention else int(total.flops @ sizes),
                fusion=kind.fusion,
                fused_kernels=total.fused_kernels,
                fused_bytes=int(total.fused_bytes @ sizes),
            )
        )
    few = Operation(part="head and loss", kernels=_BOOKKEEPING, bytes=0)
    return [*found, *_loss(config, vocabulary_size=vocabulary_size, rows=work.head_slots), few]


def accumulation_operations(config: TransformerConfig, *, vocabulary_size: int, max_positions: int) -> list[Operation]:
    """Returns what adds the gradients of a micro-batch to the sum of the earlier ones."""
    sizes = model_sizes(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    moved = 3 * FP32_BYTES * sizes.parameters
    return [Operation(part="weights", kernels=sizes.tensors, bytes=moved, fusion="BF16 weights")]


def _loss(config: TransformerConfig, *, vocabulary_size: int, rows: int) -> Iterator[Operation]:
    """Yields the output matrix and its loss, as `kernels/cross_entropy.py` computes them chunk by chunk."""
    if not rows:
        return
    sizes = {"rows": rows, "hidden_size": config.shape["hidden_size"], "vocabulary_size": vocabulary_size}
    has_bias = model_sizes(config, vocabulary_size=vocabulary_size, max_positions=1).has_output_bias

    def operation(traffic: KernelTraffic, *, flops: int = 0, fusion: Fusion | None = None) -> Operation:
        return Operation(part="head and loss", flops=flops, fusion=fusion, **vars(traffic))

    yield operation(loss_product_traffic(**sizes), flops=PASSES * loss_products(**sizes))
    for traffic in loss_other_traffic(**sizes, has_bias=has_bias):
        yield operation(traffic, fusion="fused head")


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Kernels that are counted together."""

    part: Part
    is_product: bool
    fusion: Fusion | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Total:
    """The kernels of one kind; bytes and operations for each of `AXES`."""

    kernels: int = 0
    bytes: Factors
    flops: Factors
    fused_kernels: int = 0
    fused_bytes: Factors

    def __add__(self, other: "_Total") -> "_Total":
        return _Total(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def times(self, count: int) -> "_Total":
        return _Total(**{name: count * value for name, value in vars(self).items()})


@cache
def _totals(config: TransformerConfig, *, vocabulary_size: int) -> dict[_Kind, _Total]:
    """Returns the kernels of a whole model without attention's operations and the loss, from passes of two depths."""

    def count(shallow: TransformerConfig) -> dict[_Kind, _Total]:
        passes = trace_passes(
            shallow,
            vocabulary_size=vocabulary_size,
            max_positions=1,
            number_bytes=BF16_BYTES,
            accumulates=False,
            counts_kernels=True,
        )
        return _summed(passes)

    first, second, further = at_two_depths(config, count, periods=1)
    return {kind: first[kind].times(1 - further) + total.times(further) for kind, total in second.items()}


def _summed(passes: Passes) -> dict[_Kind, _Total]:
    nothing = np.zeros(len(AXES), dtype=np.int64)
    totals: dict[_Kind, _Total] = defaultdict(lambda: _Total(bytes=nothing, flops=nothing, fused_bytes=nothing))
    remaining = _fused(passes.kernels)
    for kernel, (kernels, moved) in zip(passes.kernels, remaining, strict=True):
        kind = _Kind(part=kernel.part, is_product=kernel.is_product, fusion=_fusion(kernel))
        totals[kind] += _Total(
            kernels=1, bytes=kernel.moved, flops=kernel.operations, fused_kernels=kernels, fused_bytes=moved
        )
    return totals


def _fusion(kernel: TracedKernel) -> Fusion | None:
    if kernel.is_product:
        return None
    if kernel.part == "weights":
        return "BF16 weights"
    return "compiled blocks" if kernel.part in _OF_BLOCKS else None


def _fused(kernels: Sequence[TracedKernel]) -> list[tuple[int, Factors]]:
    """Returns what remains of each kernel, and its bytes, if the kernels of each chain are fused.

    That kernel reads once what others have written, and writes what others read; the gradients of a norm's gains are
    summed by a second one.
    """
    nothing = np.zeros(len(AXES), dtype=np.int64)
    found = [(0, nothing) for _ in kernels]
    readers: dict[int, set[int]] = defaultdict(set)
    for index, kernel in enumerate(kernels):
        for storage, _ in kernel.reads:
            readers[storage].add(index)
    for chain in _chains(kernels):
        members = set(chain)
        written = {storage for index in chain for storage, _ in kernels[index].writes}
        read: set[int] = set()
        for index in chain:
            moved = nothing
            for storage, size in kernels[index].reads:
                if storage not in written and storage not in read:
                    moved = moved + size
                    read.add(storage)
            for storage, size in kernels[index].writes:
                if not readers[storage] or readers[storage] - members:
                    moved = moved + size
            sums = kernels[index].name == "native_layer_norm_backward"
            found[index] = int(index == chain[0]) + int(sums), moved
    return found


def _chains(kernels: Sequence[TracedKernel]) -> list[list[int]]:
    """Returns the indices of kernels of one block that can be one, in order.

    A kernel joins the latest of those from which it reads, or which read the same, if everything else that it reads is
    there when that one begins: no product is between them.
    """
    found: list[list[int]] = []
    touched: list[set[int]] = []
    writers: dict[int, int] = {}
    first_of_block = 0
    layer: int | None = None
    for index, kernel in enumerate(kernels):
        if kernel.layer is not None and kernel.layer != layer:
            layer, first_of_block = kernel.layer, len(found)
        if _fusion(kernel) == "compiled blocks":
            storages = {storage for storage, _ in kernel.reads}
            for place in reversed(range(first_of_block, len(found))):
                chain = found[place]
                is_there = all(writers.get(storage, -1) < chain[0] or writers[storage] in chain for storage in storages)
                if is_there and storages & touched[place]:
                    break
            else:
                place = len(found)
                found.append([])
                touched.append(set())
            found[place].append(index)
            touched[place] |= storages | {storage for storage, _ in kernel.writes}
        writers |= dict.fromkeys((storage for storage, _ in kernel.writes), index)
    return found
