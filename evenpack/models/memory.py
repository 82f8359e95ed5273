"""What a training step needs of a GPU's memory: an estimate to choose the size of a micro-batch by.

It counts what must be there: FP32 parameters, gradients and the optimizer's state, and what autograd keeps for the
backward pass under bf16 autocast. Left out are the framework's own context, fragments, buffers of collectives and
whatever a kernel borrows for a moment: leave a third of the card free, and measure.

Shapes: P = parameters, T = slots, R = rows that pass the output head, C = hidden size, V = vocabulary.
"""

from dataclasses import dataclass

from evenpack.models.cost import parameter_count
from evenpack.models.layers import FEED_FORWARD_RATIO
from evenpack.models.model_config import ModelConfig

_FP32, _BF16, _MASK = 4, 2, 1
"""Bytes of a number, and of a flag that tells whether dropout left a number out."""

_STATES = {"adamw": 2, "lamb": 3}
"""FP32 numbers a parameter: the two moments, and LAMB's update."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes on one rank at ZeRO 0."""

    parameters: int
    """FP32 ones, with the bfloat16 copies that autocast makes of them for a pass."""
    gradients: int
    optimizer: int
    activations: int
    """Of one micro-batch."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def estimate_training_memory(
    config: ModelConfig, *, vocabulary_size: int, max_positions: int, slots: int, head_rows: int, optimizer: str
) -> TrainingMemory:
    """Of `precision: bf16_autocast` with a varlen attention kernel, which keeps no scores.

    Args:
        slots: T of a micro-batch.
        head_rows: R of a micro-batch: its masked tokens, or all slots for GPT-2.
        optimizer: `adamw` or `lamb`.
    """
    count = parameter_count(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    return TrainingMemory(
        parameters=(_FP32 + _BF16) * count,
        gradients=_FP32 * count,
        optimizer=_STATES[optimizer] * _FP32 * count,
        activations=_activations(config, slots=slots, head_rows=head_rows),
    )


def _activations(config: ModelConfig, *, slots: int, head_rows: int) -> int:
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    block = block_bytes_per_channel(has_dropout=config.dropout > 0.0)
    kept = layers * block
    if config.activation_checkpointing:
        kept = layers * _FP32 + block  # the blocks' inputs, and one block at a time
    embedding = _FP32 + (_MASK if config.dropout > 0.0 else 0)
    head = _BF16 + _BF16 + _FP32 + _BF16 + _FP32  # into the dense layer, GELU, norm, decoder; the gradient of the last
    return width * (slots * (kept + embedding) + head_rows * head)


def block_bytes_per_channel(*, has_dropout: bool) -> int:
    """Of one slot, what a block keeps for its backward pass, divided by C.

    Into the projections of attention, the three that come out, and what attention makes of them; into the feed-forward
    layer, and what GELU gets and gives; the sums that the two norms read, in FP32; the flags of two dropouts.
    """
    attention = _BF16 * (1 + 3 + 1)
    feed_forward = _BF16 * (1 + FEED_FORWARD_RATIO + FEED_FORWARD_RATIO)
    norms = 2 * _FP32
    return attention + feed_forward + norms + (2 * _MASK if has_dropout else 0)
