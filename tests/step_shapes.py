"""Defines the shapes of steps in tests: packs, packed and assigned by cost unless a test changes them."""

from dataclasses import replace
from typing import Any

from evenpack.data.order.step_shape import CostWeights, StepShape

PACKS = StepShape(
    batching="packs",
    items_per_step=1,
    items_per_micro_batch=1,
    layout="packed",
    isolate=True,
    reset_positions=True,
    policy="cost_balanced",
    cost_weights=CostWeights(per_token=1.0, per_squared_length=0.1, per_segment=0.0),
    windows=(),
    balances_each_micro_batch=False,
)


def step_shape(**changes: Any) -> StepShape:
    """Returns `PACKS` with other values; a micro-batch is as large as the step if only the step is given."""
    if "items_per_step" in changes:
        changes = {"items_per_micro_batch": changes["items_per_step"], **changes}
    return replace(PACKS, **changes)
