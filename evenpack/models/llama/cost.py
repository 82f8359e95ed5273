"""The parameters, operations and memory of a Llama, by formula."""

from evenpack.models.common.cost import PASSES, ModelCost, Work, attention_flops
from evenpack.models.common.memory import FP32_BYTES, LayerBytes, rotation_bytes, stream_bytes
from evenpack.models.common.outline import BlockOutline, ModelOutline
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


def layer_bytes(config: LlamaConfig, *, slots: int, head_rows: int, number_bytes: int) -> LayerBytes:
    """Returns what the layers hold: SwiGLU blocks whose norms read the stream, and a last norm before the LM head."""
    width = config.shape["hidden_size"]
    stream = FP32_BYTES * slots * width
    block = _block_bytes(config, slots=slots, number_bytes=number_bytes)
    return LayerBytes(
        embedding=slots * stream_bytes(config, norms=1) + rotation_bytes(config, slots=slots),
        block=block,
        block_input=stream,
        recomputed=block - stream,  # the first norm reads the block's input, which is there
        recomputing=0,
        block_backward=_block_backward_bytes(config, slots=slots, number_bytes=number_bytes),
        head=0,
        head_forward=FP32_BYTES * head_rows * width,  # the last norm's output
        head_backward=0,
        block_parameters=_block_weights(config) + 2 * width,
        cast_parameters=_block_weights(config),
        merged_parameters=(
            width * (width + 2 * config.key_value_size),
            2 * width * config.shape["feed_forward_size"],
        ),
        tied_head=config.tied_head,
    )


def _block_bytes(config: LlamaConfig, *, slots: int, number_bytes: int) -> int:
    """Returns what a block keeps.

    These are the input of attention's projections, their three outputs, attention's output and the logarithms of its
    sums; rotated queries and keys; the input of the feed-forward layer, the gate before and after SiLU, the values, and
    their product; the sums that the two norms read, in FP32; the flags of two dropouts.
    """
    width, keys = config.shape["hidden_size"], config.key_value_size
    attention = number_bytes * (width + (width + 2 * keys) + width) + FP32_BYTES * config.shape["heads"]
    rotated = number_bytes * (width + keys)
    feed_forward = number_bytes * (width + 4 * config.shape["feed_forward_size"])
    return slots * (attention + rotated + feed_forward + stream_bytes(config, norms=2))


def _block_backward_bytes(config: LlamaConfig, *, slots: int, number_bytes: int) -> int:
    """Returns the most that the backward pass through a block holds, where the gate meets the values.

    These are the gradients of their product, of the gate's SiLU and of the values, less the product, which is no longer
    needed, and the FP32 gradient of the last matrix.
    """
    inner = config.shape["feed_forward_size"]
    return slots * 2 * number_bytes * inner + FP32_BYTES * config.shape["hidden_size"] * inner


def _block_weights(config: LlamaConfig) -> int:
    """Returns the elements of a block's matrices: four of attention, and three of the feed-forward layer."""
    width = config.shape["hidden_size"]
    return 2 * width * width + 2 * width * config.key_value_size + 3 * width * config.shape["feed_forward_size"]


def outline(config: LlamaConfig, *, vocabulary_size: int) -> ModelOutline:
    """Returns the layers: SwiGLU and RMSNorm, without biases."""
    return ModelOutline(
        layers=config.shape["layers"],
        block=BlockOutline(
            width=config.shape["hidden_size"],
            key_value_size=config.key_value_size,
            feed_forward_size=config.shape["feed_forward_size"],
            is_gated=True,
            has_biases=False,
            rotary_head_size=config.shape["hidden_size"] // config.shape["heads"],
            has_dropout=config.dropout > 0.0,
        ),
        is_causal=True,
        vocabulary_size=vocabulary_size,
        tables=1,
        has_embedding_norm=False,
        has_final_norm=True,
        is_head_tied=config.tied_head,
        head_matrix=None,
        has_output_bias=False,
    )


LLAMA_COST = ModelCost(parameter_count=parameter_count, step_flops=step_flops, layer_bytes=layer_bytes, outline=outline)
