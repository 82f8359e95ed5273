"""Estimated seconds of a step: each kernel at the rate of its products or of its bytes, whichever takes longer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from evenpack.engine.optimizers.config import OptimizerBase
from evenpack.engine.resolving.cost_model import LinearSeconds
from evenpack.engine.sharding import SHARDINGS
from evenpack.models.common.device_peaks import find_device_peak
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import Work, attention_flops, model_products, model_sizes
from evenpack.models.families import family_of
from evenpack.models.traffic import (
    PARTS,
    Fusion,
    Operation,
    Part,
    accumulation_operations,
    gradient_operations,
)
from evenpack.studies.roofline.rates import Rates
from evenpack.units import FP32_BYTES


@dataclass(frozen=True, kw_only=True)
class PaperStep:
    """One optimizer step of one device."""

    operations: tuple[Operation, ...]
    attended: int
    """Pairs that attend in all micro-batches, times the channels of all layers."""
    attending: int
    """Slots of all micro-batches, times the same."""

    def under(self, fusions: Iterable[Fusion]) -> "PaperStep":
        """Returns the step with these fusions made."""
        made = frozenset(fusions)
        return replace(self, operations=tuple(one.under(made) for one in self.operations))


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """What a part of a step is made of, and its seconds at given rates."""

    part: Part
    flops: int
    bytes: int
    kernels: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of a step: of its parts, and of starting kernels."""

    parts: tuple[PartCost, ...]
    launches: float
    """Gaps between kernels, or what the device waits for a host that issues them, if that is more."""
    is_host_bound: bool

    @property
    def total(self) -> float:
        """Returns the seconds of the whole step."""
        return sum(part.seconds for part in self.parts) + self.launches


def paper_step(
    model: TransformerConfig,
    work: Work,
    *,
    vocabulary_size: int,
    max_positions: int,
    micro_batches: int,
    optimizer: OptimizerBase,
    zero_stage: int,
    ranks: int,
) -> PaperStep:
    """Returns a step of so many micro-batches of this work on each of `ranks` devices, without communication."""
    sizes = {"vocabulary_size": vocabulary_size, "max_positions": max_positions}
    gradients = gradient_operations(model, vocabulary_size=vocabulary_size, work=work)
    added = accumulation_operations(model, **sizes)
    update = update_operation(model, **sizes, optimizer=optimizer, zero_stage=zero_stage, ranks=ranks)
    products = model_products(model, vocabulary_size=vocabulary_size)
    of_a_channel = 4  # operations of a pair: a multiplication and an addition, for scores and for values
    return PaperStep(
        operations=(
            *(one.times(micro_batches) for one in gradients),
            *(one.times(micro_batches - 1) for one in added),
            update,
        ),
        attended=micro_batches * attention_flops(products, work) // of_a_channel,
        attending=micro_batches * work.slots * sum(products.attention.values()) // of_a_channel,
    )


def update_operation(
    model: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    optimizer: OptimizerBase,
    zero_stage: int,
    ranks: int,
) -> Operation:
    """Returns what stands between a step's gradients and its end, without communication."""
    sharding = SHARDINGS[zero_stage]
    sizes = model_sizes(model, vocabulary_size=vocabulary_size, max_positions=max_positions)
    kernels, reduction = sharding.reduction_traffic(
        tensors=sizes.tensors, ranks=ranks, parameters=sizes.parameters, tables=sizes.tables
    )
    update = optimizer.update_bytes / (ranks if sharding.stage else 1)
    return Operation(
        part="optimizer",
        kernels=kernels,
        bytes=round(sizes.parameters * (reduction + update)),
        fusion="fused update",
        fused_kernels=2,
        fused_bytes=round(sizes.parameters * (FP32_BYTES + update)),  # the norm needs a pass of its own
    )


def step_seconds(step: PaperStep, rates: Rates) -> StepSeconds:
    """Returns the seconds of a step at these rates."""
    parts = tuple(_part(part, step, rates) for part in PARTS)
    busy = sum(part.seconds for part in parts)
    kernels = sum(part.kernels for part in parts)
    gaps, issued = kernels * rates.kernel_gap, kernels * rates.issue
    return StepSeconds(parts=parts, launches=max(gaps, issued - busy), is_host_bound=issued > busy + gaps)


def _part(part: Part, step: PaperStep, rates: Rates) -> PartCost:
    operations = [one for one in step.operations if one.part == part]
    return PartCost(
        part=part,
        flops=sum(one.flops for one in operations),
        bytes=sum(one.bytes for one in operations),
        kernels=sum(one.kernels for one in operations),
        seconds=sum(_seconds(one, step, rates) for one in operations),
    )


def _seconds(operation: Operation, step: PaperStep, rates: Rates) -> float:
    moved = operation.bytes / rates.bandwidth
    if operation.part == "attention" and operation.flops and rates.attention_per_pair:
        return max(moved, attention_seconds(step, rates))
    return max(moved, operation.flops / rates.products)


def attention_seconds(step: PaperStep, rates: Rates) -> float:
    """Returns the seconds of attention itself in a step, in all layers and both directions."""
    return rates.attention_per_slot * step.attending + rates.attention_per_pair * step.attended


def excesses(expected: StepSeconds, floor: StepSeconds) -> Sequence[tuple[str, float]]:
    """Returns the seconds of each part, and of launches, above the floor, the most first."""
    above: list[tuple[str, float]] = [
        (mine.part, mine.seconds - least.seconds) for mine, least in zip(expected.parts, floor.parts, strict=True)
    ]
    return sorted([*above, ("launches", expected.launches)], key=lambda pair: -pair[1])


_SLOTS = 1 << 16
"""A large micro-batch, in which products are bound by operations; the estimate is linear from here on."""


def linear_seconds(
    model: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    head_share: float,
    optimizer: OptimizerBase,
    device: str,
) -> LinearSeconds:
    """Returns the estimate of a model on one device, without fusions and without communication.

    Gaps between kernels are in the constant. A host that issues kernels more slowly than the device runs them is left
    out.

    Args:
        head_share: rows of the output head per slot: 1 for next tokens.

    Raises: ConfigError for a device without a known peak.
    """
    peak = find_device_peak(device)
    rates = Rates.expected(peak, causal=family_of(model).causal)

    def seconds(slots: int, squared_lengths: int, pairs_within: Mapping[int, int]) -> tuple[float, float]:
        work = Work(
            slots=slots,
            squared_lengths=squared_lengths,
            head_slots=round(head_share * slots),
            sequences=slots // 256,
            pairs_within=pairs_within,
        )
        step = paper_step(
            model,
            work,
            vocabulary_size=vocabulary_size,
            max_positions=max_positions,
            micro_batches=1,
            optimizer=optimizer,
            zero_stage=0,
            ranks=1,
        )
        found = step_seconds(step, rates)
        kernels = sum(part.kernels for part in found.parts)
        update = next(part for part in found.parts if part.part == "optimizer")
        per_step = update.seconds + update.kernels * rates.kernel_gap
        return sum(part.seconds for part in found.parts) + kernels * rates.kernel_gap - per_step, per_step

    squares = _SLOTS * 512
    within = dict.fromkeys(model.windows, squares)
    (less, per_step), (more, _), (squarer, _) = (
        seconds(_SLOTS, squares, within),
        seconds(2 * _SLOTS, 2 * squares, dict.fromkeys(within, 2 * squares)),
        seconds(_SLOTS, 2 * squares, within),
    )
    per_squared_length = (squarer - less) / squares
    per_pair_within = {
        window: (seconds(_SLOTS, squares, within | {window: 2 * squares})[0] - less) / squares for window in within
    }
    per_slot = (more - less - (per_squared_length + sum(per_pair_within.values())) * squares) / _SLOTS
    return LinearSeconds(
        constant=max(0.0, 2 * less - more),
        per_slot=per_slot,
        per_squared_length=per_squared_length,
        per_pair_within=per_pair_within,
        per_step=per_step,
    )
