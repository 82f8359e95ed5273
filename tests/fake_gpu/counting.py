"""Counts what a traced step would do on the device: floating-point operations, and operators by phase and caller."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.attention.varlen  # declares operators that are asked for here
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.visible_pairs import visible_pairs
from fake_gpu.attention_operators import OPERATORS, by_name, tensors_of

aten = torch.ops.aten

_PASSES = {"forward": 1, "backward": 2}
"""Passes of useful work; the scores that a backward kernel computes again are not counted."""


def flop_formulas(lengths_of: Callable[[Tensor], Sequence[int]]) -> dict[Any, Callable[..., int]]:
    """Returns formulas for attention over segments, and for products that are added to something.

    For these torch has none in place, and one that fails where the result has a type of its own.

    Args:
        lengths_of: the lengths of the segments that a tensor of boundaries, or of the segment of each slot, stands for.
    """
    formulas: dict[Any, Callable[..., int]] = {
        aten.addmm_: _added_product,
        aten.addmm: _added_product,
    }
    for name in OPERATORS:
        namespace, _, operator = name.partition("::")
        direction = "backward" if operator.endswith("backward") else "forward"
        packet = getattr(getattr(torch.ops, namespace), operator)
        formulas[packet] = _attention(packet.default, _PASSES[direction], lengths_of)
    return formulas


def is_attention(packet: Any) -> bool:
    """Returns whether an operator that was counted computes attention over segments."""
    return str(packet).replace(".", "::") in OPERATORS


def _attention(operator: Any, passes: int, lengths_of: Callable[[Tensor], Sequence[int]]) -> Callable[..., int]:
    def operations(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        given = by_name(operator, arguments, named)
        queries, _, _, boundaries, _ = tensors_of(operator.name(), given)
        is_causal = given.get("is_causal", given.get("causal", False))
        lengths = lengths_of(boundaries)
        pairs = int(visible_pairs(np.array(lengths), window=_window(given), causal=is_causal).sum())
        channels = queries.numel() // sum(lengths)
        scores: int = 2 * channels * pairs
        return passes * 2 * scores  # and as many for the weighted sums of values

    operations._get_raw = True  # type: ignore[attr-defined]  # FlopCounterMode then gives tensors, not shapes
    return operations


def _window(given: Mapping[str, Any]) -> int | None:
    """Returns the tokens on each side that an operator sees, by its arguments; None: all of its segment."""
    before = (given.get("window_size") or [given.get("window_size_left", given.get("window"))])[0]
    return None if before is None or before < 0 else int(before)


def _added_product(_: Any, left: Sequence[int], right: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


Caller = Literal["evenpack", "DeepSpeed", "optimizer", "backward pass"]

_CALLERS: dict[str, Caller] = {"evenpack": "evenpack", "deepspeed": "DeepSpeed", "torch.optim": "optimizer"}
"""Packages and who they are; what has none of them on its stack is the backward pass."""

_WITHOUT_WORK = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.detach,
    aten.promote_types,
    aten.lift_fresh,
}
"""Operators that make a tensor without writing it; views are recognised by their schemas."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of operator of a step."""

    phase: Phase | None
    """Phase of the step; None: after the update, where results are collected."""
    caller: Caller
    """The innermost of the packages on the stack; the model is evenpack's."""
    name: str


class StepOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for `trace_steps(beside=...)`; `counts` is complete when it has been left.

    An operator over a list of tensors counts once, though it may be a few kernels.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Operator] = Counter()
        self._pending: Counter[tuple[Caller, str]] = Counter()
        observer = engine.observer

        def note(phase: Phase) -> None:
            observer(phase)
            self._end(phase)

        engine.observer = note

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = operator(*arguments, **(named or {}))
        is_work = not (operator.is_view or operator.overloadpacket in _WITHOUT_WORK or operator.namespace == "prim")
        if is_work and _is_on_device((arguments, named, result)):
            self._pending[_caller(), str(operator.overloadpacket).removeprefix("aten.")] += 1
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._end(None)

    def _end(self, phase: Phase | None) -> None:
        for (caller, name), count in self._pending.items():
            self.counts[Operator(phase=phase, caller=caller, name=name)] += count
        self._pending.clear()


def _is_on_device(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_iter(values))


def _caller() -> Caller:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for package, caller in _CALLERS.items():
            if module.startswith(f"{package}."):
                return caller
        frame = frame.f_back
    return "backward pass"
