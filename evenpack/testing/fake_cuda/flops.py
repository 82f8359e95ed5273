"""Operations that `FlopCounterMode` does not count, or not by the conventions of `models/cost.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.attention.varlen  # declares operators that are asked for here
from torch import Tensor

from evenpack.testing.fake_cuda.attention_operators import OPERATORS, by_name

_PASSES = {"forward": 1, "backward": 2}
"""Passes of useful work; the scores that a backward kernel computes again are not counted."""


def flop_formulas(lengths_of: Callable[[Tensor], Sequence[int]]) -> dict[Any, Callable[..., int]]:
    """Returns formulas for attention over segments, and for products that are added to something.

    For these torch has none in place, and one that fails where the result has a type of its own.

    Args:
        lengths_of: the lengths of the segments that a tensor of boundaries, or of the segment of each slot, stands for.
    """
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten.addmm_: _added_product,
        torch.ops.aten.addmm: _added_product,
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
        queries, _, _, boundaries, _ = OPERATORS[operator.name()]
        is_causal = given.get("is_causal", given.get("causal", False))
        lengths = lengths_of(given[boundaries])
        pairs = sum(length * (length + 1) // 2 if is_causal else length**2 for length in lengths)
        channels = given[queries].numel() // sum(lengths)
        scores: int = 2 * channels * pairs
        return passes * 2 * scores  # and as many for the weighted sums of values

    operations._get_raw = True  # type: ignore[attr-defined]  # FlopCounterMode then gives tensors, not shapes
    return operations


def _added_product(_: Any, left: Sequence[int], right: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
