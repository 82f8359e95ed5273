"""The estimate of a micro-batch as a linear function of what it holds, for simulated clusters."""

from dataclasses import dataclass

from evenpack.engine.optimizers.config import OptimizerBase
from evenpack.models.common.device_peaks import find_device_peak
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import Work, parameter_count
from evenpack.models.families import family_of
from evenpack.studies.roofline.estimate import outline_of, paper_step, step_seconds
from evenpack.studies.roofline.rates import Rates

_SLOTS = 1 << 16
"""A large micro-batch, in which products are bound by operations; the estimate is linear from here on."""


@dataclass(frozen=True, kw_only=True)
class LinearSeconds:
    """Seconds of forward and backward: constant + per_slot · slots + per_squared_length · Σ length²."""

    constant: float
    per_slot: float
    per_squared_length: float
    per_step: float
    """Seconds of the update, once per step."""


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

    Raises: ConfigError for a device without a known peak, or a family that does not describe its layers.
    """
    outline = outline_of(model, vocabulary_size=vocabulary_size)
    peak = find_device_peak(device)
    rates = Rates.expected(peak, causal=family_of(model).causal)
    parameters = parameter_count(model, vocabulary_size=vocabulary_size, max_positions=max_positions)

    def seconds(slots: int, squared_lengths: int) -> tuple[float, float]:
        work = Work(
            slots=slots, squared_lengths=squared_lengths, head_slots=round(head_share * slots), sequences=slots // 256
        )
        step = paper_step(
            outline, work, micro_batches=1, parameters=parameters, optimizer=optimizer, zero_stage=0, ranks=1
        )
        found = step_seconds(step, rates)
        kernels = sum(part.kernels for part in found.parts)
        update = next(part for part in found.parts if part.part == "optimizer")
        per_step = update.seconds + update.kernels * rates.kernel_gap
        return sum(part.seconds for part in found.parts) + kernels * rates.kernel_gap - per_step, per_step

    squares = _SLOTS * 512
    (less, per_step), (more, _), (squarer, _) = (
        seconds(_SLOTS, squares),
        seconds(2 * _SLOTS, 2 * squares),
        seconds(_SLOTS, 2 * squares),
    )
    per_squared_length = (squarer - less) / squares
    per_slot = (more - less - per_squared_length * squares) / _SLOTS
    return LinearSeconds(
        constant=max(0.0, 2 * less - more),
        per_slot=per_slot,
        per_squared_length=per_squared_length,
        per_step=per_step,
    )
