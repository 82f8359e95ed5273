"""Sums in, exact global means out.

A model returns the *sum* of its weighted token losses. Which share of the step a rank holds is chance, so a mean
taken there would weigh tokens unequally. Every rank knows the whole step's denominator from the plan instead, and no
communication is needed to normalise exactly.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from evenpack.batch import StepCounts


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """What one micro-batch adds to the step."""

    loss_sum: Float[Tensor, ""]
    """Sum of weight x cross-entropy in nats; FP32, differentiable."""
    correct: Int[Tensor, ""]
    """Targets whose label had the highest logit."""
    targets: int
    """Positions summed over."""


def scaled_loss(sums: LossSums, step_counts: StepCounts, *, world_size: int, accumulation: int) -> Float[Tensor, ""]:
    """What a rank hands to the backward pass, so that the gradient is that of the step's mean loss per target.

    Data parallelism averages gradients over `world_size` ranks and the engine divides each of `accumulation`
    micro-batches by their number, so both are multiplied back; what remains is the sum over all micro-batches of all
    ranks of loss_sum / targets of the step. The mean of all scaled losses is therefore the exact global mean loss.

    A step without a single target has loss 0 and gradient 0.
    """
    return sums.loss_sum * (world_size * accumulation / max(step_counts.targets, 1))
