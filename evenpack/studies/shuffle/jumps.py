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

    Steps without a loss (NaN) count in no mean. Borders with fewer than `around` steps on a side, or none with a loss
    there, are left out; None: all of them are.
    """
    sides = [(losses[step - around : step], losses[step : step + around]) for step in at if step >= around]
    found = [
        float(np.nanmean(after) - np.nanmean(before))
        for before, after in sides
        if len(after) == around and np.isfinite(before).any() and np.isfinite(after).any()
    ]
    return float(np.mean(found)) if found else None
