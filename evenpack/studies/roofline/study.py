"""The roofline of a run: a step at the peaks of a GPU, as expected, and with each fusion."""

from dataclasses import dataclass, replace

import torch

from evenpack.data.order.step_shape import Layout
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.models.common.device_peaks import DevicePeak, find_device_peak
from evenpack.models.cost import Work
from evenpack.models.families import family_of
from evenpack.models.traffic import FUSIONS
from evenpack.studies.budget.data import RunData
from evenpack.studies.budget.study import settled_data
from evenpack.studies.roofline.command import RooflineCommand
from evenpack.studies.roofline.estimate import StepSeconds, excesses, paper_step, step_seconds
from evenpack.studies.roofline.rates import MEASURED_ON, Rates, bandwidth_of

_LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded")


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part of a step, without fusions."""

    part: str
    flops: int
    bytes: int
    kernels: int
    floor_seconds: float
    """Every operation and byte that all fusions leave, at the peaks."""
    expected_seconds: float
    """ESTIMATE, not measured."""
    fused_seconds: float
    """ESTIMATE of what all fusions leave."""


@dataclass(frozen=True, kw_only=True)
class FusionRow:
    """The seconds that a fusion saves."""

    fusion: str
    saved_seconds: float
    """Seconds saved in a step without other fusions."""
    tokens_per_second: float
    """ESTIMATE with this fusion and those above."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The result of the study. Nothing in it is measured."""

    run: str
    model: str
    device: str
    devices: int
    micro_batches: int
    slots_per_micro_batch: int
    tokens_per_step: float
    """Real tokens of one device's step."""
    parts: tuple[PartRow, ...]
    launches_seconds: float
    """Time between kernels, without fusions."""
    fused_launches_seconds: float
    is_host_bound: bool
    """Whether the host issues kernels more slowly than the device runs them."""
    floor_tokens_per_second: float
    expected_tokens_per_second: float
    expected_mfu: float
    fusions: tuple[FusionRow, ...]
    excesses: tuple[tuple[str, float], ...]
    """Seconds above the floor, by part, the most first."""
    goal: float | None
    assumptions: tuple[str, ...]

    @property
    def rows(self) -> tuple[PartRow, ...]:
        """Returns the parts, and the launches as one more: they are no work, and there are none at the peaks."""
        launches = PartRow(
            part="launches",
            flops=0,
            bytes=0,
            kernels=0,
            floor_seconds=0.0,
            expected_seconds=self.launches_seconds,
            fused_seconds=self.fused_launches_seconds,
        )
        return *self.parts, launches

    @property
    def reached_with(self) -> str | None:
        """Returns the fusion with which the estimate reaches the goal; None if it does not, or needs none."""
        reached = [row.fusion for row in self.fusions if self.goal is not None and row.tokens_per_second >= self.goal]
        return reached[0] if reached and not self.is_reached else None

    @property
    def is_reached(self) -> bool:
        """Returns whether the estimate reaches the goal without fusions."""
        return self.goal is not None and self.expected_tokens_per_second >= self.goal


def study_roofline(config: RunConfig, given: RooflineCommand) -> Roofline:
    """Computes the roofline of one device's step.

    The data is read where it is prepared, else packs are taken as full of the longest sequences.

    Raises: ConfigError for a device without peaks or bfloat16, a number too small, and what is not traced (precision,
    layout, checkpointing); and as `settled_data`.
    """
    device = _checked_device(given)
    _require_counted(config)
    settled, data = settled_data(config, vocabulary_size=given.vocabulary_size)
    config = settled.config
    items, micro_batches = config.training.items_per_micro_batch, settled.micro_batches(given.devices)
    work = _work(config, data, items)
    step = paper_step(
        config.model,
        work,
        vocabulary_size=data.vocabulary_size,
        max_positions=config.max_positions,
        micro_batches=micro_batches,
        optimizer=config.optimizer,
        zero_stage=config.deepspeed.zero_stage,
        ranks=given.devices,
    )
    expected_rates = Rates.expected(device, causal=family_of(config.model).causal)
    fused = step.under(FUSIONS)
    floor = step_seconds(fused, Rates.peak(device))
    expected, expected_fused = step_seconds(step, expected_rates), step_seconds(fused, expected_rates)
    tokens = float(items * micro_batches * data.item.tokens)
    rows = []
    for number, fusion in enumerate(FUSIONS, start=1):
        alone = step_seconds(step.under([fusion]), expected_rates)
        together = step_seconds(step.under(FUSIONS[:number]), expected_rates)
        rows.append(
            FusionRow(
                fusion=fusion,
                saved_seconds=expected.total - alone.total,
                tokens_per_second=tokens / together.total,
            )
        )
    flops = sum(part.flops for part in expected.parts)
    return Roofline(
        run=config.run.name,
        model=f"{config.model.kind} {config.model.preset}",
        device=device.name,
        devices=given.devices,
        micro_batches=micro_batches,
        slots_per_micro_batch=work.slots,
        tokens_per_step=tokens,
        parts=_rows(expected, floor, expected_fused),
        launches_seconds=expected.launches,
        fused_launches_seconds=expected_fused.launches,
        is_host_bound=expected.is_host_bound,
        floor_tokens_per_second=tokens / floor.total,
        expected_tokens_per_second=tokens / expected.total,
        expected_mfu=flops / expected.total / (device.half_precision * 1e12),
        fusions=tuple(rows),
        excesses=tuple(excesses(expected, floor)),
        goal=given.goal,
        assumptions=(*data.assumptions, *_assumptions(config, device.name, given.devices)),
    )


def _checked_device(given: RooflineCommand) -> DevicePeak:
    """Checks the options, and returns the device. Raises: ConfigError."""
    device = find_device_peak(given.device)
    bandwidth_of(device)
    device.require_flops(torch.bfloat16)
    if given.devices < 1:
        raise ConfigError(f"--devices must be 1 or more, found {given.devices}")
    if given.goal is not None and not given.goal > 0:
        raise ConfigError(f"--goal must be tokens per second, more than 0, found {given.goal:g}")
    return device


def _require_counted(config: RunConfig) -> None:
    """Checks the run. Raises: ConfigError if its bytes are not those that are traced."""
    training, model = config.training, config.model
    for key, value, counted in (
        ("training.precision", training.precision, ("bf16_autocast",)),
        ("training.layout", training.layout, _LAYOUTS),
        ("model.activation_checkpointing", model.activation_checkpointing, (False,)),
    ):
        if value not in counted:
            expected = " or ".join(str(one).lower() for one in counted)
            raise ConfigError(
                f"the roofline counts the bytes of {key}={expected}, found {str(value).lower()}: add {key}="
                f"{str(counted[0]).lower()} to see the step with it"
            )


def _work(config: RunConfig, data: RunData, items: int) -> Work:
    """Returns the work of a micro-batch, with the padding that goes through the model."""
    tokens = round(items * data.item.tokens)
    slots = items * data.item.row_slots if config.training.layout == "packed" else tokens
    masked = family_of(config.model).objective == "masked_tokens"
    sequences = round(items * data.item.sequences) if config.model.predicts_next_sentence else 0
    work = data.useful.plus(data.of_padding).of_items(items, slots=slots, sequences=sequences)
    return replace(work, head_slots=round(items * data.useful.targets) if masked else slots)


def _rows(expected: StepSeconds, floor: StepSeconds, fused: StepSeconds) -> tuple[PartRow, ...]:
    return tuple(
        PartRow(
            part=mine.part,
            flops=mine.flops,
            bytes=mine.bytes,
            kernels=mine.kernels,
            floor_seconds=least.seconds,
            expected_seconds=mine.seconds,
            fused_seconds=left.seconds,
        )
        for mine, least, left in zip(expected.parts, floor.parts, fused.parts, strict=True)
    )


def _assumptions(config: RunConfig, device: str, devices: int) -> tuple[str, ...]:
    found = ["an attention kernel that keeps no scores; padding at the end of packs is left out of its squares"]
    if config.training.compile:
        found.append("the step is shown without torch.compile; for training.compile=true see the row compiled blocks")
    if device != MEASURED_ON:
        found.append(f"attention reaches the share of {device}'s peak that was measured on an {MEASURED_ON}")
    shape = config.model.shape
    if shape["hidden_size"] // shape["heads"] != 64:
        found.append("attention at the rates of head size 64, which is not this model's")
    if config.model.windows:
        found.append("a pair within a window takes as long as another one, whatever tiles a kernel computes")
    if config.model.dropout_of_attention > 0.0:
        found.append("dropout of attention costs nothing")
    if devices > 1:
        found.append(f"one of {devices} devices, without the communication between them")
    return tuple(found)
