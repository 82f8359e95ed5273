"""Counts the operators of a traced step that would start work on the device: by phase, and by who calls them."""

import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from evenpack.engine.engine import Phase, TrainingEngine

aten = torch.ops.aten

Caller = Literal["evenpack", "DeepSpeed", "optimizer", "backward pass"]

_CALLERS: dict[str, Caller] = {"evenpack": "evenpack", "deepspeed": "DeepSpeed", "torch.optim": "optimizer"}
"""Packages and who they are; harness excluded, and what has none of them on its stack is the backward pass."""

_WITHOUT_WORK = {aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.lift_fresh}
"""Operators that make a tensor without writing it; views are recognised by their schemas."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of operator of a step."""

    phase: Phase | None
    """None: after the update, where results are collected."""
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
        if not module.startswith("evenpack.testing."):
            for package, caller in _CALLERS.items():
                if module.startswith(f"{package}."):
                    return caller
        frame = frame.f_back
    return "backward pass"
