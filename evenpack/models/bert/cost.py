"""The parameters, operations and memory of a BERT, by formula."""

from evenpack.models.bert.config import BertConfig
from evenpack.models.common.cost import (
    PASSES,
    ModelCost,
    Work,
    attention_flops,
    gelu_block_parameters,
    gelu_block_weights,
    gelu_cast_parameters,
    layer_norm_parameters,
)
from evenpack.models.common.memory import (
    FP32_BYTES,
    LayerBytes,
    gelu_backward_bytes,
    gelu_block_bytes,
    stream_bytes,
)
from evenpack.models.common.outline import Matrix, ModelOutline, gelu_block_outline


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


def layer_bytes(config: BertConfig, *, slots: int, head_rows: int, number_bytes: int) -> LayerBytes:
    """Returns what the layers hold: blocks whose norms read sums, and the masked-token head at the masked tokens.

    Embeddings keep the sum that their norm reads. Recomputing a block runs to its last norm, while the gradient of its
    output waits. The head keeps the inputs of its dense layer, of GELU and of its norm; the next-sentence head, which
    reads a row for each sequence, is left out.
    """
    width = config.shape["hidden_size"]
    stream = FP32_BYTES * slots * width
    block = gelu_block_bytes(config, slots=slots, number_bytes=number_bytes)
    return LayerBytes(
        embedding=slots * stream_bytes(config, norms=1),
        block=block,
        block_input=stream,
        recomputed=block - (stream if number_bytes == FP32_BYTES else 0),  # in FP32 attention reads the block's input
        recomputing=stream + _outputs_of_a_block(config, slots=slots, number_bytes=number_bytes),
        block_backward=gelu_backward_bytes(config, slots=slots, number_bytes=number_bytes),
        head=head_rows * width * (number_bytes + number_bytes + FP32_BYTES),
        head_forward=stream + FP32_BYTES * head_rows * width,  # the outputs of the last block and of the head's norm
        head_backward=stream,  # the gradient of the masked tokens, spread over all slots
        block_parameters=gelu_block_parameters(width),
        cast_parameters=gelu_cast_parameters(width),
        merged_parameters=(3 * width * width,),
        tied_head=True,
    )


def _outputs_of_a_block(config: BertConfig, *, slots: int, number_bytes: int) -> int:
    """Returns the outputs of attention, of the feed-forward layer, and of both norms, as far as nothing keeps them.

    In FP32 the first norm's output is the input of the feed-forward layer.
    """
    norms = 1 if number_bytes == FP32_BYTES else 2
    return slots * config.shape["hidden_size"] * (2 * number_bytes + norms * FP32_BYTES)


def outline(config: BertConfig, *, vocabulary_size: int) -> ModelOutline:
    """Returns the layers; the decoder of masked tokens is the token embedding with a bias of its own."""
    width = config.shape["hidden_size"]
    dense = Matrix(inputs=width, outputs=width, has_bias=True)
    classifier = Matrix(inputs=width, outputs=2, has_bias=True)
    return ModelOutline(
        layers=config.shape["layers"],
        block=gelu_block_outline(config),
        is_causal=False,
        vocabulary_size=vocabulary_size,
        tables=3,
        has_embedding_norm=True,
        has_final_norm=False,
        is_head_tied=True,
        head_matrix=dense,
        has_output_bias=True,
        sequence_matrices=(dense, classifier) if config.next_sentence else (),
    )


BERT_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, layer_bytes=layer_bytes, outline=outline)
