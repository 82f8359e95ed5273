"""Exact global mean losses from the sums that models return.

A model returns the *sum* of its weighted losses. Ranks hold unequal parts of a step, so a mean taken on each would
weigh tokens unequally. Every rank has the whole step's denominators from the plan instead, and no communication is
needed to normalise exactly.

The loss of a step is the token loss, over next or masked tokens, plus the next-sentence loss of a model that predicts
it. Each has its own denominator:

    token loss      loss_reduction: token       sum over targets / targets
                    loss_reduction: sequence    sum over sequences of (sum over its targets / their number)
                                                / sequences; collation puts the inner division into the weights
    next sentence   pair_reduction: sequence    sum over sequences / sequences
                    pair_reduction: pack        sum over packs of (sum over its sequences / their number) / packs; the
                                                inner division is in the weights, too

A sequence without a target adds 0 to the token loss and counts as a sequence, as in listing 5 of the source.

Source: Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination, arXiv:2107.02027), sections 3.2.3
(loss per sequence) and T.6 (loss balancing).
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from evenpack.models.common.section import TransformerConfig
from evenpack.step_counts import StepCounts


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """The loss sums and counts that one micro-batch adds to the step."""

    loss_sum: Float[Tensor, ""]
    """Sum of weight x cross-entropy over next or masked tokens in nats; FP32, differentiable."""
    correct: Int[Tensor, ""]
    """Targets whose label had the highest logit."""
    targets: int
    """Positions summed over."""
    next_sentence_loss_sum: Float[Tensor, ""]
    """Sum of weight x cross-entropy over sequences in nats; zero for a model without next-sentence prediction."""
    next_sentence_correct: Int[Tensor, ""]
    """Sequences whose label had the higher logit."""

    @staticmethod
    def of_tokens(*, loss_sum: Float[Tensor, ""], correct: Int[Tensor, ""], targets: int) -> "LossSums":
        """Returns the sums of a model that predicts tokens and nothing else."""
        return LossSums(
            loss_sum=loss_sum,
            correct=correct,
            targets=targets,
            next_sentence_loss_sum=loss_sum.new_zeros(()),
            next_sentence_correct=correct.new_zeros(()),
        )

    def with_next_sentence(self, loss_sum: Float[Tensor, ""], correct: Int[Tensor, ""]) -> "LossSums":
        """Returns these sums with those of next-sentence prediction added."""
        return replace(self, next_sentence_loss_sum=loss_sum, next_sentence_correct=correct)


@dataclass(frozen=True, kw_only=True)
class LossDenominators:
    """The numbers that divide the two loss sums of a whole step over all ranks; never zero."""

    tokens: float
    next_sentence: float

    def times(self, factor: int) -> "LossDenominators":
        """Returns both denominators multiplied."""
        return LossDenominators(tokens=factor * self.tokens, next_sentence=factor * self.next_sentence)


def exact_denominators(config: TransformerConfig, step_counts: StepCounts) -> LossDenominators:
    """Returns the exact denominators: the counts summed over; a step without a target has loss 0 and gradient 0."""
    return LossDenominators(
        tokens=float(max(step_counts.sequences if _is_mean_of_means(config) else step_counts.targets, 1)),
        next_sentence=float(max(step_counts.packs if config.pair_reduction == "pack" else step_counts.sequences, 1)),
    )


def expected_denominators(
    config: TransformerConfig,
    *,
    packs: int,
    targets_of_a_full_pack: float,
    token_efficiency: float,
    packing_factor: float,
) -> LossDenominators:
    """Returns the denominators that a step has on average (section T.6, equations 25 and 26).

    They are the same in every step, so that tokens and sequences have equal weights in all steps, and the losses' ratio
    does not depend on the content of a step. A loss divided by them means something only when averaged over steps.

    Args:
        packs: number in a step over all ranks (b).
        targets_of_a_full_pack: masked tokens of a pack without padding (m): 76 at 512 slots.
        token_efficiency: real tokens / slots (e), above 0.
        packing_factor: sequences / packs (p), at least 1.
    """
    sequences = packs * packing_factor
    return LossDenominators(
        tokens=sequences if _is_mean_of_means(config) else packs * targets_of_a_full_pack * token_efficiency,
        next_sentence=float(packs) if config.pair_reduction == "pack" else sequences,
    )


def scaled_loss(
    sums: LossSums, denominators: LossDenominators, *, world_size: int, accumulation: int
) -> Float[Tensor, ""]:
    """Returns the loss that a rank hands to the backward pass, so that the gradient is that of the step's mean loss.

    Data parallelism averages gradients over `world_size` ranks and the engine divides each of `accumulation`
    micro-batches by their number, so both are multiplied back; the result is the sum over all micro-batches of all
    ranks of loss_sum / denominator of the step. The mean of all scaled losses is therefore the exact global mean loss.
    """
    parts = world_size * accumulation
    token_loss = sums.loss_sum * (parts / denominators.tokens)
    return token_loss + sums.next_sentence_loss_sum * (parts / denominators.next_sentence)


def _is_mean_of_means(config: TransformerConfig) -> bool:
    return config.loss_reduction == "sequence"
