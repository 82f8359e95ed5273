"""The parameters, operations and activations of a GPT-2, by formula."""

from evenpack.models.common.cost import (
    PASSES,
    ModelCost,
    Work,
    attention_flops,
    gelu_activation_bytes,
    gelu_block_parameters,
    gelu_block_weights,
    layer_norm_parameters,
)
from evenpack.models.gpt2.config import Gpt2Config


def parameter_count(config: Gpt2Config, *, vocabulary_size: int, max_positions: int) -> int:
    """Returns the number of trained parameters; the LM head is the token embedding."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    position_rows = max_positions if config.positions == "learned" else 0
    embeddings = (vocabulary_size + position_rows) * width
    return embeddings + layers * gelu_block_parameters(width) + layer_norm_parameters(width)


def step_flops(config: Gpt2Config, *, vocabulary_size: int, work: Work) -> int:
    """Returns the operations of the blocks, of causal attention and of the LM head."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    blocks = 2 * layers * gelu_block_weights(width) * work.slots
    head = 2 * width * vocabulary_size * work.head_slots
    return PASSES * (blocks + attention_flops(config, work, causal=True) + head)


GPT2_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, activation_bytes=gelu_activation_bytes)
