"""Counts the kernels of a fake step, and the bytes that they read and write.

Each operator on the device counts as one kernel that reads its inputs from memory once and writes its results there, as
in `models/trace.py`; views and uninitialised tensors are none.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.models.trace import NOTHING_MOVED, bytes_of, read_and_written
from evenpack.testing.fake_cuda.flops import is_attention

aten = torch.ops.aten

Kind = Literal["products", "attention", "others", "update"]

_PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm}


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
        if operator.is_view or packet in NOTHING_MOVED or operator.namespace in ("prim", "profiler"):
            return result
        # The gradients of attention are given to be filled.
        read, written = read_and_written(operator, arguments, named, result, fills=is_attention(packet))
        moved = sum(bytes_of(tensor) for tensor in (*read, *written) if tensor.is_cuda)
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
