"""The parameters, operations and memory of a GPT-2, by formula."""

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
    rotation_bytes,
    stream_bytes,
)
from evenpack.models.common.outline import ModelOutline, gelu_block_outline
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


def layer_bytes(config: Gpt2Config, *, slots: int, head_rows: int, number_bytes: int) -> LayerBytes:
    """Returns what the layers hold: blocks whose norms read the stream, and a last norm before the LM head."""
    width = config.shape["hidden_size"]
    stream = FP32_BYTES * slots * width
    block = gelu_block_bytes(config, slots=slots, number_bytes=number_bytes)
    return LayerBytes(
        embedding=slots * stream_bytes(config, norms=1) + rotation_bytes(config, slots=slots),
        block=block,
        block_input=stream,
        recomputed=block - stream,  # the first norm reads the block's input, which is there
        recomputing=0,
        block_backward=gelu_backward_bytes(config, slots=slots, number_bytes=number_bytes),
        head=0,
        head_forward=FP32_BYTES * head_rows * width,  # the last norm's output
        head_backward=0,
        block_parameters=gelu_block_parameters(width),
        cast_parameters=gelu_cast_parameters(width),
        merged_parameters=(3 * width * width,),
        tied_head=True,
    )


def outline(config: Gpt2Config, *, vocabulary_size: int) -> ModelOutline:
    """Returns the layers; the LM head is the token embedding."""
    return ModelOutline(
        layers=config.shape["layers"],
        block=gelu_block_outline(config),
        is_causal=True,
        vocabulary_size=vocabulary_size,
        tables=2 if config.positions == "learned" else 1,
        has_embedding_norm=False,
        has_final_norm=True,
        is_head_tied=True,
        head_matrix=None,
        has_output_bias=False,
    )


GPT2_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, layer_bytes=layer_bytes, outline=outline)
