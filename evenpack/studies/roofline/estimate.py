"""Seconds of a step on paper: each kernel at the rate of its products or of its bytes, whichever takes longer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenpack.engine.optimizers.config import OptimizerBase
from evenpack.engine.sharding import sharding_at
from evenpack.errors import ConfigError
from evenpack.models.common.outline import ModelOutline
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.traffic import (
    PARTS,
    Fusion,
    Operation,
    Part,
    accumulation_operations,
    gradient_operations,
)
from evenpack.models.cost import Work
from evenpack.models.families import family_of
from evenpack.studies.roofline.rates import Rates

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PaperStep:
    """One optimizer step of one device."""

    outline: ModelOutline
    work: Work
    """Work of a micro-batch, padding included."""
    micro_batches: int
    parameters: int
    operations: tuple[Operation, ...]

    def under(self, fusions: Iterable[Fusion]) -> "PaperStep":
        """Returns the step with these fusions made."""
        made = frozenset(fusions)
        return PaperStep(
            outline=self.outline,
            work=self.work,
            micro_batches=self.micro_batches,
            parameters=self.parameters,
            operations=tuple(one.under(made) for one in self.operations),
        )


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


def outline_of(model: TransformerConfig, *, vocabulary_size: int) -> ModelOutline:
    """Returns the layers of a model. Raises: ConfigError if its family does not describe them."""
    describe = family_of(model).cost.outline
    if describe is None:
        raise ConfigError(
            f"the family of model.kind {model.kind} describes no layers (cost.outline), so the time of a step is not "
            "known on paper; measure it by `evenpack study throughput --cost-model FILE`"
        )
    return describe(model, vocabulary_size=vocabulary_size)


def paper_step(
    outline: ModelOutline,
    work: Work,
    *,
    micro_batches: int,
    parameters: int,
    optimizer: OptimizerBase,
    zero_stage: int,
    ranks: int,
) -> PaperStep:
    """Returns a step of so many micro-batches of this work on each of `ranks` devices, without communication."""
    gradients = [one.times(micro_batches) for one in gradient_operations(outline, work)]
    added = [one.times(micro_batches - 1) for one in accumulation_operations(outline, parameters)]
    update = update_operation(outline, parameters=parameters, optimizer=optimizer, zero_stage=zero_stage, ranks=ranks)
    return PaperStep(
        outline=outline,
        work=work,
        micro_batches=micro_batches,
        parameters=parameters,
        operations=(*gradients, *added, update),
    )


def update_operation(
    outline: ModelOutline, *, parameters: int, optimizer: OptimizerBase, zero_stage: int, ranks: int
) -> Operation:
    """Returns what stands between a step's gradients and its end, without communication."""
    sharding = sharding_at(zero_stage)
    tables = [outline.vocabulary_size * outline.block.width] * (1 if outline.is_head_tied else 2)
    kernels, reduction = sharding.reduction_traffic(
        tensors=outline.tensors, ranks=ranks, parameters=parameters, tables=tables
    )
    update = optimizer.update_bytes / (ranks if sharding.stage else 1)
    return Operation(
        part="optimizer",
        kernels=kernels,
        bytes=round(parameters * (reduction + update)),
        fusion="fused update",
        fused_kernels=2,
        fused_bytes=round(parameters * (_FP32_BYTES + update)),  # the norm needs a pass of its own
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
        return max(moved, step.micro_batches * attention_seconds(step.outline, step.work, rates))
    return max(moved, operation.flops / rates.products)


def attention_seconds(outline: ModelOutline, work: Work, rates: Rates) -> float:
    """Returns the seconds of attention itself over a micro-batch, in all layers and both directions."""
    pairs = work.attended_pairs(causal=outline.is_causal)
    channels = outline.layers * outline.block.width
    return channels * (rates.attention_per_slot * work.slots + rates.attention_per_pair * pairs)


def excesses(expected: StepSeconds, floor: StepSeconds) -> Sequence[tuple[str, float]]:
    """Returns the seconds of each part, and of launches, above the floor, the most first."""
    above: list[tuple[str, float]] = [
        (mine.part, mine.seconds - least.seconds) for mine, least in zip(expected.parts, floor.parts, strict=True)
    ]
    return sorted([*above, ("launches", expected.launches)], key=lambda pair: -pair[1])
