"""Counts the kernels of a fake step, and the bytes that they read and write.

Each operator on the device counts as one kernel that reads its inputs from memory once and writes its results there;
views and uninitialised tensors are none. Look-ups read the rows that they return, not the whole table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.testing.fake_cuda.flops import is_attention

aten = torch.ops.aten

Kind = Literal["products", "attention", "others", "update"]

_PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm}
_NOTHING = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach, aten.promote_types}
_LOOK_UPS = {aten.embedding, aten.index_select, aten.gather}
_SCATTERS = {aten.scatter_add_}
_FILLS = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full}
_ONLY_WRITTEN = {aten.copy_, aten.fill_, aten.zero_}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Kernels and what they move."""

    kernels: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(kernels=self.kernels + other.kernels, bytes=self.bytes + other.bytes)


class TrafficMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all operators on the device within the context, by their kind."""

    supports_higher_order_operators = True

    def __init__(self, engine: TrainingEngine) -> None:
        """Follows the phases of the engine's step, from now on."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Traffic] = {kind: Traffic(kernels=0, bytes=0) for kind in get_args(Kind)}
        self._micro_batches = engine.micro_batches
        self._reduction_stream = getattr(engine.reduction, "stream", None)
        observer = engine.observer

        def follow(phase: Phase) -> None:
            observer(phase)
            self._micro_batches -= phase == "backward"

        engine.observer = follow

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = operator(*arguments, **named)
        if not isinstance(operator, OpOverload):
            return result
        packet = operator.overloadpacket
        if operator.is_view or packet in _NOTHING or operator.namespace in ("prim", "profiler"):
            return result
        moved = sum(_sizes(operator, arguments, named, result))
        if moved:
            kind = self._kind(packet)
            self.found[kind] += Traffic(kernels=1, bytes=moved)
        return result

    def _kind(self, packet: Any) -> Kind:
        if self._micro_batches == 0 or torch.cuda.current_stream() is self._reduction_stream:
            return "update"
        if packet in _PRODUCTS:
            return "products"
        return "attention" if is_attention(packet) else "others"


def _sizes(operator: OpOverload, arguments: Any, named: Any, result: Any) -> Iterator[int]:
    """Yields the bytes of what is read, and of what is written."""
    packet = operator.overloadpacket
    schema = operator._schema.arguments
    given = [(schema[index], value) for index, value in enumerate(arguments)]
    given += [(argument, named[argument.name]) for argument in schema if argument.name in named]
    if packet in _LOOK_UPS:
        yield 2 * _bytes(result)
        return
    if packet in _SCATTERS:
        yield 3 * _bytes(arguments[3])
        return
    if packet in _FILLS:
        yield _bytes(result)
        return
    is_only_written = packet in _ONLY_WRITTEN or is_attention(
        packet
    )  # the gradients of attention are given to be filled
    is_in_place = False
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_in_place = is_in_place or is_written
        is_read = not is_written or not (is_only_written or argument.name == "out")
        yield _bytes(value) * (is_written + is_read)
    if not is_in_place:
        yield _bytes(result)


def _bytes(values: Any) -> int:
    return sum(
        min(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
        for leaf in tree_iter(values)
        if isinstance(leaf, Tensor) and leaf.is_cuda
    )
