"""The numbers behind small fake tensors, followed from operator to operator.

Fake tensors have no numbers. A few of ours are needed: boundaries of segments say what attention computes, and a host
that reads them on purpose must be given them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MOST_NUMBERS = 1 << 13
"""Larger results are not followed."""


class KnownValues:
    """Real CPU tensors by the fake ones that stand for them."""

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
        """Computes the numbers of an operator's results, where those of its arguments are known and few."""
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
        """Returns what an operator makes of the numbers of its arguments, all of which are known, on the CPU."""
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
