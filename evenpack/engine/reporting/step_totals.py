"""Reduces the values of a step over all ranks: a sum of a vector and a maximum, where the host waits for the device.

The size of both is independent of the number of ranks. Values of single ranks are gathered rarely (`rank_times.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.engine import LocalStep
from evenpack.engine.reporting.reduction import RankValue, reduce_over_ranks
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.models.common.losses import LossDenominators
from evenpack.step_counts import StepCounts

_LIMBS = 4
_LIMB_BITS = 16
"""A 64-bit number is sent as four 16-bit ones, whose sums over ranks float64 represents exactly."""

_LIMB = "_order_hash_{}"
_SOURCE_TOKENS = "_source_tokens_{}"
"""Names of the parts of values that are more than one number."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The totals of one step over all ranks."""

    loss_sums: tuple[float, float]
    """Sums of the loss in nats, over the step's targets and over its next sentences."""
    optimised_losses: tuple[float, float]
    """The two losses whose gradient was taken; they differ from the means where `loss_balancing` is not exact."""
    correct: tuple[int, int]
    """Numbers of targets and of next sentences whose label had the highest logit."""
    denominators: LossDenominators
    """The denominators of the loss sums."""
    stop: bool
    """Whether a stop was requested on any rank."""
    counts: StepCounts
    """The counts of what the ranks collated."""
    squared_lengths: int
    """Sum of length² over segments, padding left out."""
    padding_targets: int
    """Number of targets that are padding within sequences."""
    order_hash: int
    """Sum mod 2**64 over what the ranks collated; it does not depend on the assignment to ranks."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source, in the mixture's order."""
    metrics: Mapping[str, int | float]
    """Measured values that go into the step's record unchanged (`definitions.py`)."""

    @property
    def gradient_norm(self) -> float:
        """L2 norm of the global mean gradient before clipping."""
        return self.metrics["gradient_norm"]

    @property
    def slots(self) -> int:
        """Number of slots, padding included."""
        return int(self.metrics["slots"])

    @property
    def token_loss(self) -> float:
        """Mean loss over targets, or over the means of sequences; 0 for a step without any."""
        return self.loss_sums[0] / self.denominators.tokens

    @property
    def loss_per_real_target(self) -> float:
        """The loss sum divided by the number of targets that are not padding.

        The sum includes the loss of padding, so the quotient is at least the mean loss of real targets; it approaches
        that mean as the loss of padding becomes negligible.
        """
        return self.loss_sums[0] / max(self.counts.targets - self.padding_targets, 1)

    @property
    def next_sentence_loss(self) -> float:
        """Mean next-sentence loss over sequences; 0 without next-sentence prediction."""
        return self.loss_sums[1] / self.denominators.next_sentence

    @property
    def loss(self) -> float:
        """The sum of token loss and next-sentence loss."""
        return self.token_loss + self.next_sentence_loss

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def sum_over_ranks(
    world: World,
    batches: StepBatches,
    local: LocalStep,
    denominators: LossDenominators,
    *,
    stop: bool,
    loader_seconds: float,
) -> StepTotals:
    """Returns the totals of a step over all ranks; every rank calls it once per step.

    Raises: RunError if the ranks together did not collate what this rank's plan of the step holds.
    """
    measured = _measured(batches, local, stop=stop, loader_seconds=loader_seconds)
    totals = _totals(reduce_over_ranks(world, measured), denominators)
    if totals.counts != batches.counts:
        raise RunError(
            f"step {batches.step + 1}: the plan of rank {world.rank} has {batches.counts}, the ranks together "
            f"collated {totals.counts}: do all ranks read the same prepared data and the same run file?"
        )
    return totals


def _measured(batches: StepBatches, local: LocalStep, *, stop: bool, loader_seconds: float) -> dict[str, RankValue]:
    """Returns the values measured on this rank. A new metric is a line here and one in `definitions.py`."""
    micro_batches = batches.micro_batches
    counts = sum((batch.local_counts for batch in micro_batches[1:]), micro_batches[0].local_counts)
    order_hash = sum(batch.order_hash for batch in micro_batches)
    source_tokens = [sum(tokens) for tokens in zip(*(batch.source_tokens for batch in micro_batches), strict=True)]
    compute_seconds = local.stopwatch.seconds()
    token_loss_sum, next_sentence_loss_sum = local.loss_sums.double().sum(dim=0).unbind()
    return {
        "gradient_norm": local.gradient_norm,
        "tokens": counts.tokens,
        "targets": counts.targets,
        "sequences": counts.sequences,
        "slots": sum(batch.slots for batch in micro_batches),
        "segment_room": max(len(batch.cu_seqlens) - 1 for batch in micro_batches),
        "host_to_device_bytes": sum(batch.moved_bytes for batch in micro_batches),
        "compute_seconds_mean": compute_seconds,
        "compute_seconds_max": compute_seconds,
        "loader_seconds": loader_seconds,
        "_token_loss_sum": token_loss_sum,
        "_next_sentence_loss_sum": next_sentence_loss_sum,
        "_optimised_token_loss": local.optimised_losses[0],
        "_optimised_next_sentence_loss": local.optimised_losses[1],
        "_correct_targets": local.correct[0],
        "_correct_next_sentences": local.correct[1],
        "_stop": stop,
        "_packs": counts.packs,
        "_squared_lengths": sum(batch.squared_lengths for batch in micro_batches),
        "_padding_targets": sum(batch.padding_targets for batch in micro_batches),
        **{_LIMB.format(index): (order_hash >> (_LIMB_BITS * index)) % (1 << _LIMB_BITS) for index in range(_LIMBS)},
        **{_SOURCE_TOKENS.format(index): tokens for index, tokens in enumerate(source_tokens)},
    }


def _totals(reduced: Mapping[str, int | float], denominators: LossDenominators) -> StepTotals:
    whole = {name: int(value) for name, value in reduced.items() if isinstance(value, int)}
    sources = sum(name.startswith(_SOURCE_TOKENS.format("")) for name in reduced)
    return StepTotals(
        loss_sums=(reduced["_token_loss_sum"], reduced["_next_sentence_loss_sum"]),
        optimised_losses=(reduced["_optimised_token_loss"], reduced["_optimised_next_sentence_loss"]),
        correct=(whole["_correct_targets"], whole["_correct_next_sentences"]),
        denominators=denominators,
        stop=whole["_stop"] > 0,
        counts=StepCounts(
            packs=whole["_packs"],
            sequences=whole["sequences"],
            tokens=whole["tokens"],
            targets=whole["targets"],
        ),
        squared_lengths=whole["_squared_lengths"],
        padding_targets=whole["_padding_targets"],
        order_hash=sum(whole[_LIMB.format(index)] << (_LIMB_BITS * index) for index in range(_LIMBS)) % (1 << 64),
        source_tokens=tuple(whole[_SOURCE_TOKENS.format(index)] for index in range(sources)),
        metrics={name: value for name, value in reduced.items() if not name.startswith("_")},
    )
