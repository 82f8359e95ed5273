"""Watches every operator of a fake step: where the host would wait, devices and dtypes that are wrong, slow kernels.

A wait is what `torch.cuda.set_sync_debug_mode` would report on a GPU: a number or a shape that the host reads, a copy
to the host, a copy to the device that does not ask to be asynchronous, a call that synchronises. Operators are named
with the innermost line of evenpack or DeepSpeed that led to them.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from fake_gpu.attention_operators import broken_contract
from fake_gpu.device import listening_to_waits
from fake_gpu.slow_kernels import PRODUCTS, slow_path, unaligned_matrix

aten = torch.ops.aten

_COPIES = {aten._to_copy, aten.copy_, aten.copy, aten.lift_fresh}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_BACKWARD = "the backward pass"

Kind = Literal["wait", "device", "dtype", "contract", "alignment", "slow path"]
"""The last two are slow and not wrong: products of unaligned matrices, and a kernel for each tensor of a list."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that a step on a GPU must not do."""

    kind: Kind
    operator: str
    place: str
    """The function of evenpack or DeepSpeed that led to it, as `module.function`, or the backward pass."""
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.operator} in {self.place}: {self.problem}"


class Watch(TorchDispatchMode):
    """Records the faults of all operators within the context.

    Args:
        product_dtype: the type of all factors of matrix products and attention.
        wide_products: operators whose factors may be FP32 in any case (`bmm`: attention that is computed by formula).
        expected_waits: functions that may read the device, with the number that a read of unknown value is given.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        product_dtype: torch.dtype,
        wide_products: Collection[str] = (),
        expected_waits: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.product_dtype = product_dtype
        self.wide_products = frozenset(wide_products)
        self.expected_waits = expected_waits or {}
        self.values = KnownValues()
        self.faults: list[Fault] = []
        self.waits: Counter[str] = Counter()
        """Expected waits, by the function that waits."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches operators, and the functions of `torch.cuda` and of fake tensors that are none."""
        element_by_element = FakeTensor.tolist
        FakeTensor.tolist = lambda tensor: self._read(tensor, "tolist")  # type: ignore[method-assign,assignment]
        try:
            with listening_to_waits(lambda name: self._wait(name, "it waits for the device")), self:
                yield
        finally:
            FakeTensor.tolist = element_by_element  # type: ignore[method-assign]

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if not isinstance(operator, OpOverload):  # an operator that calls functions: what they call is watched
            return operator(*arguments, **named)
        packet = operator.overloadpacket
        tensors = [leaf for leaf in tree_iter((arguments, named)) if isinstance(leaf, Tensor)]
        if packet is aten._local_scalar_dense:
            return self._read(tensors[0], str(packet))
        is_on_device = any(tensor.is_cuda for tensor in tensors)
        if is_on_device:
            self._check_reads(operator, arguments, tensors)
            self._check_devices(packet, tensors)
            self._check_dtypes(operator, tensors)
            self._check("contract", packet, broken_contract(operator, arguments, named, self.product_dtype))
            self._check("slow path", packet, slow_path(operator, arguments, named))
        if torch.Tag.dynamic_output_shape in operator.tags and all(
            self.values.of(tensor) is not None for tensor in tensors
        ):
            return self._computed(operator, arguments, named, tensors[0])
        result = operator(*arguments, **named)
        if packet in _COPIES:
            self._check_copy(packet, arguments, named, result)
        if is_on_device:
            self._check("alignment", packet, unaligned_matrix(packet, arguments, result))
        self.values.follow(operator, arguments, named, result)
        return result

    def _computed(self, operator: Any, arguments: Any, named: Any, tensor: Any) -> Any:
        """Returns the result whose shape depends on known numbers."""
        real = self.values.compute(operator, arguments, named)
        fake = tensor.fake_mode.from_tensor(real).to(tensor.device)
        self.values.learn(fake, real)
        return fake

    def _read(self, tensor: Any, operator: str) -> Any:
        """Returns the number, or list of numbers, that the host reads, or others in their place."""
        if tensor.is_cuda:
            self._wait(operator, "the host reads numbers from the device")
        known = self.values.of(tensor)
        with torch._C._DisableTorchDispatch():
            if known is None:
                known = torch.full(tuple(tensor.shape), self.expected_waits.get(_place(), 1.0)).to(tensor.dtype)
            return known.tolist()

    def _wait(self, operator: str, problem: str) -> None:
        place = _place()
        if place in self.expected_waits:
            self.waits[place] += 1
        else:
            self._fault("wait", operator, problem)

    def _check_reads(self, operator: Any, arguments: Any, tensors: list[Tensor]) -> None:
        tags = operator.tags
        by_flags = operator.overloadpacket in _INDEXING and any(
            leaf.is_cuda and leaf.dtype in (torch.bool, torch.uint8)
            for leaf in tree_iter(arguments[1])
            if isinstance(leaf, Tensor)
        )
        if by_flags or (torch.Tag.dynamic_output_shape in tags and operator.overloadpacket not in _INDEXING):
            self._wait(str(operator.overloadpacket), "the shape of its result depends on numbers on the device")
        elif torch.Tag.data_dependent_output in tags:
            self._wait(str(operator.overloadpacket), "its result is a number on the host")

    def _check_devices(self, packet: Any, tensors: list[Tensor]) -> None:
        strangers = [tensor for tensor in tensors if not tensor.is_cuda and tensor.dim() > 0]
        if strangers and packet not in _COPIES:
            shape = tuple(strangers[0].shape)
            self._fault("device", str(packet), f"a tensor {shape} on {strangers[0].device} among those on the device")

    def _check_dtypes(self, operator: OpOverload, tensors: list[Tensor]) -> None:
        packet = operator.overloadpacket
        if operator._overloadname.startswith("dtype"):  # what the product is added to has the type that is asked for
            tensors = tensors[1:3]
        if packet not in PRODUCTS or str(packet).removeprefix("aten.") in self.wide_products:
            return
        found = {tensor.dtype for tensor in tensors}
        if found != {self.product_dtype}:
            shapes = ", ".join(
                f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors
            )
            self._fault("dtype", str(packet), f"expected {self.product_dtype}, found {shapes}")

    def _check_copy(self, packet: Any, arguments: Any, named: Any, result: Any) -> None:
        target = arguments[0] if packet is aten.copy_ else result
        source = arguments[1] if packet in (aten.copy_, aten.copy) else arguments[0]
        if source.is_cuda and not target.is_cuda:
            self._wait(str(packet), f"a copy of {tuple(source.shape)} to the host")
        is_asynchronous = named.get("non_blocking", False) or (packet is aten.copy_ and arguments[2:3] == (True,))
        if target.is_cuda and not source.is_cuda and not is_asynchronous:
            self._wait(str(packet), f"a copy of {tuple(source.shape)} to the device without non_blocking")

    def _check(self, kind: Kind, packet: Any, problem: str | None) -> None:
        if problem is not None:
            self._fault(kind, str(packet), problem)

    def _fault(self, kind: Kind, operator: str, problem: str) -> None:
        fault = Fault(kind=kind, operator=operator, place=_place(), problem=problem)
        if fault not in self.faults:
            self.faults.append(fault)


def _place() -> str:
    """Returns the innermost function of evenpack or DeepSpeed on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("evenpack.", "deepspeed.")):
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return _BACKWARD


MOST_NUMBERS = 1 << 13
"""Larger results are not followed."""


class KnownValues:
    """The numbers behind small fake tensors, followed from operator to operator: real CPU tensors by fake ones.

    A few of ours are needed: boundaries of segments say what attention computes, and a host that reads them on purpose
    must be given them.
    """

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def learn(self, fake: Tensor, real: Tensor) -> None:
        """Keeps the numbers of a fake tensor."""
        self._values[fake] = real

    def of(self, fake: Tensor) -> Tensor | None:
        """Returns the numbers of a fake tensor, or a real one itself; None where they are not known."""
        if type(fake) is Tensor:
            return fake
        known: Tensor | None = self._values.get(fake)
        return known if known is not None else getattr(fake, "constant", None)

    def follow(self, operator: Any, arguments: Sequence[Any], named: Mapping[str, Any], result: Any) -> None:
        """Computes the numbers of an operator's results, where the arguments' numbers are known and few."""
        fakes = [leaf for leaf in tree_iter((arguments, dict(named))) if isinstance(leaf, Tensor)]
        if operator._schema.is_mutable:
            self._forget_written(operator, arguments)
            return
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if not results or torch.Tag.nondeterministic_seeded in operator.tags:
            return
        if sum(tensor.numel() for tensor in results) > MOST_NUMBERS or any(self.of(fake) is None for fake in fakes):
            return
        if not fakes and not _is_a_sequence_of_numbers(operator):
            return
        for fake, value in zip(results, tree_iter(self.compute(operator, arguments, named)), strict=True):
            self.learn(fake, value)

    def compute(self, operator: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Returns the operator's result on the CPU for the numbers of its arguments, which are all known."""
        with torch._C._DisableTorchDispatch():
            real_arguments, real_named = tree_map(self._real, (tuple(arguments), dict(named)))
            return operator(*real_arguments, **real_named)

    def _forget_written(self, operator: Any, arguments: Sequence[Any]) -> None:
        for declared, given in zip(operator._schema.arguments, arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for leaf in tree_iter(given):
                    if isinstance(leaf, Tensor):
                        self._values.pop(leaf, None)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.of(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_a_sequence_of_numbers(operator: Any) -> bool:
    """Returns whether an operator without tensors makes known numbers: `empty` and its like do not."""
    return operator.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.full, torch.ops.aten.zeros)
