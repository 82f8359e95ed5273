"""Estimates the GPU memory of a training step, to choose the size of a micro-batch by.

It counts FP32 parameters, gradients and the optimizer's state, and what autograd keeps for the backward pass under
bf16 autocast. It leaves out the framework's context, fragmentation, buffers of collectives and temporary memory of
kernels: leave a third of the device's memory free, and measure.

Shapes: P = parameters, T = slots, R = rows that go through the output head, C = hidden size, V = vocabulary.
"""

from dataclasses import dataclass

from evenpack.models.common.cost import BF16_BYTES, FP32_BYTES
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import parameter_count
from evenpack.models.families import family_of


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The bytes of a training step on one rank at ZeRO 0."""

    parameters: int
    """FP32 parameters, with the bfloat16 copies that autocast makes of them for a pass."""
    gradients: int
    optimizer: int
    activations: int
    """Activations of one micro-batch."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def estimate_training_memory(
    config: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    slots: int,
    head_rows: int,
    optimizer_states: int,
) -> TrainingMemory:
    """Estimates `precision: bf16_autocast` with a varlen attention kernel, which keeps no scores.

    Args:
        slots: T of a micro-batch.
        head_rows: R of a micro-batch: its masked tokens, or all slots of a model that predicts the next ones.
        optimizer_states: FP32 numbers per parameter that the optimizer holds (`fp32_states` of its section).
    """
    count = parameter_count(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    return TrainingMemory(
        parameters=(FP32_BYTES + BF16_BYTES) * count,
        gradients=FP32_BYTES * count,
        optimizer=optimizer_states * FP32_BYTES * count,
        activations=family_of(config).cost.activation_bytes(config, slots=slots, head_rows=head_rows),
    )
