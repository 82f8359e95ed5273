"""The jump of the loss where one block ends and the next begins."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.order.pack_stream import PackStream


def borders(plan: PackStream, *, packs_per_step: int, steps: int) -> list[int]:
    """Returns the steps of the first epoch, counted from 0, that are the first to hold packs of a further block."""
    if not isinstance(plan, BlockedPlan):
        return []
    ends: list[int] = []
    position = 0
    while position < plan.packs:
        first, _ = plan.sequences_ahead(position, 1)[0]
        block = int(np.searchsorted(plan.blocks.first_sequences, first, side="right")) - 1
        position += int(plan.blocks.packs[block])
        ends.append(-(-position // packs_per_step))
    return [step for step in ends[:-1] if step < steps]


def jump(losses: Float64[np.ndarray, " steps"], at: Sequence[int], *, around: int) -> float | None:
    """Returns the mean, over borders, of the mean loss of the steps after one minus that of the steps before it.

    Borders with fewer than `around` steps on a side are left out; None: all of them are.
    """
    found = [
        float(losses[step : step + around].mean() - losses[step - around : step].mean())
        for step in at
        if step >= around and step + around <= len(losses)
    ]
    return float(np.mean(found)) if found else None
