"""The parameters, operations and activations of a Llama, by formula."""

from evenpack.models.common.cost import (
    BF16_BYTES,
    FP32_BYTES,
    MASK_BYTES,
    PASSES,
    ModelCost,
    Work,
    attention_flops,
    rotation_bytes,
    stream_bytes,
)
from evenpack.models.llama.config import LlamaConfig


def parameter_count(config: LlamaConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Returns the number of trained parameters; positions have none, and an untied LM head has a matrix of its own."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    matrices = vocabulary_size * width * (1 if config.tied_head else 2)
    return matrices + layers * (_block_weights(config) + 2 * width) + width


def step_flops(config: LlamaConfig, *, vocabulary_size: int, work: Work) -> int:
    """Returns the operations of the blocks, of causal attention and of the LM head; shared key heads save none."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    blocks = 2 * layers * _block_weights(config) * work.slots
    head = 2 * width * vocabulary_size * work.head_slots
    return PASSES * (blocks + attention_flops(config, work, causal=True) + head)


def activation_bytes(config: LlamaConfig, *, slots: int, head_rows: int) -> int:
    """Returns the activations of SwiGLU blocks and of the LM head.

    A slot of a block keeps the input of attention's projections, their three outputs and attention's output; rotated
    queries and keys; the input of the feed-forward layer, the gate before and after SiLU, the values, and their
    product; the sums that the two norms read, in FP32; the flags of two dropouts.
    """
    width = config.shape["hidden_size"]
    attention = BF16_BYTES * (width + width + 2 * config.key_value_size + width)
    feed_forward = BF16_BYTES * (width + 4 * config.shape["feed_forward_size"])
    dropout = 2 * MASK_BYTES * width if config.dropout > 0.0 else 0
    rotation = rotation_bytes(query_size=width, key_size=config.key_value_size)
    block = attention + rotation + feed_forward + 2 * FP32_BYTES * width + dropout
    head = FP32_BYTES + BF16_BYTES + FP32_BYTES
    return slots * stream_bytes(config, block) + head_rows * width * head


def _block_weights(config: LlamaConfig) -> int:
    """Returns the elements of a block's matrices: four of attention, and three of the feed-forward layer."""
    width = config.shape["hidden_size"]
    return 2 * width * width + 2 * width * config.key_value_size + 3 * width * config.shape["feed_forward_size"]


LLAMA_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, activation_bytes=activation_bytes)
