"""What the ranks tell one another about a step: a sum of a vector and one maximum, where the host waits for the device.

Neither grows with the number of ranks; what each of them did by itself is told rarely (`rank_times.py`).
"""

import math
from dataclasses import dataclass

import torch

from evenpack.batch import StepCounts
from evenpack.data.batches.pipeline import StepBatches
from evenpack.engine.distributed import World
from evenpack.engine.engine import LocalStep
from evenpack.errors import RunError
from evenpack.models.common.losses import LossDenominators

_LIMBS = 4
_LIMB_BITS = 16
"""A 64-bit number travels as four: float64 holds their sums over ranks exactly."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """One step over all ranks."""

    loss_sums: tuple[float, float]
    """In nats, over the step's targets and over its next sentences."""
    optimised_losses: tuple[float, float]
    """The two losses whose gradient was taken; other than the means where `loss_balancing` is not exact."""
    correct: tuple[int, int]
    """Targets and next sentences whose label had the highest logit."""
    denominators: LossDenominators
    """What the loss sums are divided by."""
    gradient_norm: float
    stop: bool
    """Whether any rank was asked to stop."""
    counts: StepCounts
    """What the ranks really collated."""
    slots: int
    """Padding included."""
    squared_lengths: int
    """Sum of length² over segments, what only fills them up left out."""
    padding_targets: int
    """Targets that only fill sequences up."""
    moved_bytes: int
    """That the batches take from the hosts to the devices."""
    order_hash: int
    """Sum mod 2**64 over what the ranks really collated, whoever did."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source, in the mixture's order."""
    compute_seconds_mean: float
    """Over the ranks: forward and backward passes, without exchange."""
    compute_seconds_max: float
    loader_seconds: float
    """That a rank waited for its batches, on average."""

    @property
    def token_loss(self) -> float:
        """Mean over targets, or over the means of sequences; 0 for a step without any."""
        return self.loss_sums[0] / self.denominators.tokens

    @property
    def loss_per_real_target(self) -> float:
        """The same sum over targets that are no padding: at least their own mean loss, and near it once padding, whose
        part is in the sum, costs next to nothing.
        """
        return self.loss_sums[0] / max(self.counts.targets - self.padding_targets, 1)

    @property
    def next_sentence_loss(self) -> float:
        """Mean over sequences; 0 where next sentences are not asked for."""
        return self.loss_sums[1] / self.denominators.next_sentence

    @property
    def loss(self) -> float:
        """The sum of both."""
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
    """Adds up what the ranks did; each calls it once a step.

    Raises: RunError if the ranks did not collate what this rank's plan of the step says.
    """
    shared = local.gradient_norm if world.is_main else torch.zeros_like(local.gradient_norm)
    losses = (local.loss_sums.double().sum(dim=0), local.optimised_losses.double())
    on_device = torch.cat([*losses, local.correct.double(), shared.double().reshape(1)])
    compute_seconds = local.stopwatch.seconds()
    shares = (loader_seconds / world.size, compute_seconds / world.size)
    on_host = torch.tensor([*_host_part(batches, stop=stop), *shares, compute_seconds], dtype=torch.float64)
    vector = torch.cat([on_device, on_host.to(on_device.device, non_blocking=True)])
    values = world.all_sum(vector, maxima=1).tolist()
    totals = _unpack(values, denominators)
    if totals.counts != batches.counts:
        raise RunError(
            f"step {batches.step + 1}: the plan of rank {world.rank} has {batches.counts}, the ranks together "
            f"collated {totals.counts}: do all ranks read the same prepared data and the same run file?"
        )
    return totals


def _host_part(batches: StepBatches, *, stop: bool) -> list[float]:
    """What the host knows of this rank's share, in the order of `_unpack`."""
    micro_batches = batches.micro_batches
    order_hash = sum(batch.order_hash for batch in micro_batches)
    limbs = [(order_hash >> (_LIMB_BITS * index)) % (1 << _LIMB_BITS) for index in range(_LIMBS)]
    counts = sum((batch.local_counts for batch in micro_batches[1:]), micro_batches[0].local_counts)
    source_tokens = [sum(tokens) for tokens in zip(*(batch.source_tokens for batch in micro_batches), strict=True)]
    numbers = [
        *limbs,
        stop,
        *(counts.packs, counts.sequences, counts.tokens, counts.targets),
        sum(batch.slots for batch in micro_batches),
        sum(batch.squared_lengths for batch in micro_batches),
        sum(batch.padding_targets for batch in micro_batches),
        sum(batch.moved_bytes for batch in micro_batches),
        *source_tokens,
    ]
    return [float(number) for number in numbers]


def _unpack(values: list[float], denominators: LossDenominators) -> StepTotals:
    token_loss_sum, next_sentence_loss_sum, *rest = values
    optimised_token_loss, optimised_next_sentence_loss, *rest = rest
    correct, next_sentence_correct, gradient_norm, *rest = rest
    limbs, rest = rest[:_LIMBS], rest[_LIMBS:]
    stop, packs, sequences, tokens, targets, slots, squared_lengths, padding_targets, moved_bytes, *rest = rest
    *source_tokens, loader_seconds, compute_seconds_mean, compute_seconds_max = rest
    return StepTotals(
        loss_sums=(token_loss_sum, next_sentence_loss_sum),
        optimised_losses=(optimised_token_loss, optimised_next_sentence_loss),
        correct=(round(correct), round(next_sentence_correct)),
        denominators=denominators,
        gradient_norm=gradient_norm,
        stop=stop > 0.0,
        counts=StepCounts(packs=round(packs), sequences=round(sequences), tokens=round(tokens), targets=round(targets)),
        slots=round(slots),
        squared_lengths=round(squared_lengths),
        padding_targets=round(padding_targets),
        moved_bytes=round(moved_bytes),
        order_hash=sum(round(limb) << (_LIMB_BITS * index) for index, limb in enumerate(limbs)) % (1 << 64),
        source_tokens=tuple(round(tokens) for tokens in source_tokens),
        compute_seconds_mean=compute_seconds_mean,
        compute_seconds_max=compute_seconds_max,
        loader_seconds=loader_seconds,
    )
