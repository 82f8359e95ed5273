"""Exact global mean losses from the sums that models return.

A model returns the *sum* of each of its weighted losses, by the loss's name. Ranks hold unequal parts of a step, so a
mean taken on each would weigh tokens unequally. Every rank has the whole step's denominators from the plan instead, and
no communication is needed to normalise exactly.

The loss of a step is the sum of all losses, each divided by its own denominator (`Loss.divided_by`):

    next_token, masked_token   mlm_reduction: token               sum over targets / targets
                               mlm_reduction: sequence            sum over sequences of (sum over its targets / their
                                                                  number) / sequences
    next_sentence              next_sentence_reduction: sequence  sum over sequences / sequences
                               next_sentence_reduction: pack      sum over packs of (sum over its sequences / their
                                                                  number) / packs

Collation puts the inner divisions into the weights. A sequence without a target adds 0 to the masked-token loss and
counts as a sequence, as in listing 5 of the source.

Source: Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027), sections 3.2.3
(loss per sequence) and T.6 (loss balancing).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from evenpack.losses import Divisor, Loss, StepCounts
from evenpack.models.common.section import TransformerConfig


class LossOutput(NamedTuple):
    """What one micro-batch adds to one loss of the step. A tuple, because DeepSpeed looks into those for tensors."""

    loss_sum: Float[Tensor, ""]
    """Sum of weight x loss over the targets in nats; FP32, differentiable."""
    correct: Int[Tensor, ""] | None
    """Targets that were predicted correctly; None for a loss without targets."""


LossOutputs = dict[str, LossOutput]
"""What a model returns: its losses by name, the main one first."""

Denominators = Mapping[str, float]
"""The numbers that divide the loss sums of a whole step over all ranks, by the loss's name; never zero."""


def exact_denominators(losses: Iterable[Loss], step_counts: StepCounts) -> Denominators:
    """Returns the exact denominators: the counts summed over; a step without a target has loss 0 and gradient 0."""
    return {loss.name: float(max(step_counts.of(loss.divided_by), 1)) for loss in losses}


def expected_denominators(
    config: TransformerConfig,
    *,
    packs: int,
    targets_of_a_full_pack: float,
    token_efficiency: float,
    packing_factor: float,
) -> Denominators:
    """Returns the denominators that a step has on average (section T.6, equations 25 and 26).

    They are the same in every step, so that tokens and sequences have equal weights in all steps, and the losses' ratio
    does not depend on the content of a step. A loss divided by them means something only when averaged over steps.

    Args:
        packs: number in a step over all ranks (b).
        targets_of_a_full_pack: masked tokens of a pack without padding (m): 76 at 512 slots.
        token_efficiency: real tokens / slots (e), above 0.
        packing_factor: sequences / packs (p), at least 1.
    """
    expected: dict[Divisor, float] = {
        "targets": packs * targets_of_a_full_pack * token_efficiency,
        "sequences": packs * packing_factor,
        "packs": float(packs),
    }
    return {loss.name: expected[loss.divided_by] for loss in config.losses}


def scaled_loss(
    outputs: LossOutputs, denominators: Denominators, *, world_size: int, accumulation: int
) -> Float[Tensor, ""]:
    """Returns the loss for a rank's backward pass, scaled so that gradients are those of the step's mean loss.

    Data parallelism averages gradients over `world_size` ranks and the engine divides each of `accumulation`
    micro-batches by their number, so both are multiplied back; the result is the sum over all micro-batches of all
    ranks of loss_sum / denominator of the step. The mean of all scaled losses is therefore the exact global mean loss.

    Raises: ValueError if the model does not return the losses that its section declares.
    """
    if outputs.keys() != denominators.keys():
        raise ValueError(
            f"the model returned the losses {', '.join(outputs)}, and its section declares {', '.join(denominators)}: "
            "`losses` of the section and `forward` of the model must have the same names"
        )
    parts = world_size * accumulation
    main, *others = (outputs[name].loss_sum * (parts / denominator) for name, denominator in denominators.items())
    for other in others:
        main = main + other
    return main
