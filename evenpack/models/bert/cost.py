"""The parameters, operations and activations of a BERT, by formula."""

from evenpack.models.bert.config import BertConfig
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


def parameter_count(config: BertConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Returns the number of trained parameters; the decoder is the token embedding with a bias of its own."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    norm = layer_norm_parameters(width)
    embeddings = (vocabulary_size + max_positions + config.token_types) * width + norm
    dense = width * width + width
    masked_token_head = dense + norm + vocabulary_size
    next_sentence_head = dense + 2 * width + 2 if config.next_sentence else 0
    return embeddings + layers * gelu_block_parameters(width) + masked_token_head + next_sentence_head


def step_flops(config: BertConfig, *, vocabulary_size: int, work: Work) -> int:
    """Returns the operations of the blocks, of bidirectional attention and of both heads."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    blocks = 2 * layers * gelu_block_weights(width) * work.slots
    masked_token_head = 2 * width * (width + vocabulary_size) * work.head_slots
    next_sentence_head = 2 * width * (width + 2) * work.sequences if config.next_sentence else 0
    attention = attention_flops(config, work, causal=False)
    return PASSES * (blocks + attention + masked_token_head + next_sentence_head)


BERT_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, activation_bytes=gelu_activation_bytes)
