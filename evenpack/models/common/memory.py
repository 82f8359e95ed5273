"""The memory that layers hold in a micro-batch, by formula; needs no torch.

Conventions: products, attention and their inputs have the run's type, 2 bytes a number under bf16 autocast and 4 in
FP32; the residual stream, norms and losses are FP32. Attention is a kernel that keeps no scores. What is smaller than a
hundredth of a block is left out, such as the statistics of norms.

Shapes: T = slots of the micro-batch, R = rows of the output head, C = hidden size, F = width of the feed-forward layer,
H = heads, D = C / H.
"""

from dataclasses import dataclass

from evenpack.models.common.section import FEED_FORWARD_RATIO, TransformerConfig

FP32_BYTES, BF16_BYTES, MASK_BYTES = 4, 2, 1
"""Bytes of a number, and of a flag for a number that dropout set to zero."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What the layers of a model hold of one micro-batch, in bytes, and the sizes of their matrices."""

    embedding: int
    """Kept for the backward pass below the blocks."""
    block: int
    """Kept by one block."""
    block_input: int
    """Kept of one block where activation checkpointing recomputes the rest."""
    recomputed: int
    """What recomputing a block adds to that."""
    recomputing: int
    """The most that recomputing a block holds beside what it adds, if that may be more than `block_backward`."""
    block_backward: int
    """The most that the backward pass through a block holds beside what the block has kept."""
    head: int
    """Kept between the last block and the logits."""
    head_forward: int
    """Held beside that while the loss is computed."""
    head_backward: int
    """Held beside that in the backward pass through the head."""
    block_parameters: int
    """Parameters of one block, as a number."""
    cast_parameters: int
    """Those of them that autocast copies to bfloat16: matrices, and biases of linear layers."""
    merged_parameters: tuple[int, ...]
    """The elements of each matrix of a block that is several layers in one, which LAMB updates apart from the rest."""
    tied_head: bool
    """Whether the output matrix is the token embedding."""


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The numbers from which the memory of a training state follows."""

    parameters: int
    largest_tensor: int
    """Elements of the largest parameter."""
    states: int
    """FP32 numbers that the optimizer holds for each parameter."""
    temporaries: int
    """Those that it holds for the duration of an update of the largest group."""
    largest_group: int
    """Elements of the parameters that are updated together, at the most."""
    ranks: int


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What optimizer and sharding hold on one rank, in bytes, by `engine/sharding/`."""

    parameters: int
    """FP32 parameters during a step."""
    gradients: int
    """Gradients of parameters, at the most: those of a rank's part where each backward pass reduces them."""
    optimizer: int
    """The optimizer's state, between steps."""
    bucket: int
    """Buffers from a step's first gradient until the gradients are reduced."""
    copies: int
    """Copies of gradients that are reduced while the backward pass goes on through the blocks."""
    reduction: int
    """Buffers of the reduction beside these."""
    update_gradients: int
    """Gradients at the update."""
    update: int
    """Temporary numbers of the update."""


def gelu_block_bytes(config: TransformerConfig, *, slots: int, number_bytes: int) -> int:
    """Returns what a block with a GELU layer keeps.

    These are the input of attention's projections, their three outputs, attention's output and the logarithms of its
    sums; the input of the feed-forward layer, and GELU's input and output; the sums that the two norms read, in FP32;
    the flags of two dropouts; rotated queries and keys.
    """
    width, heads = config.shape["hidden_size"], config.shape["heads"]
    attention = number_bytes * (1 + 3 + 1) * width + FP32_BYTES * heads
    feed_forward = number_bytes * (1 + FEED_FORWARD_RATIO + FEED_FORWARD_RATIO) * width
    rotated = number_bytes * 2 * width if config.positions == "rotary" else 0
    return slots * (attention + feed_forward + rotated + stream_bytes(config, norms=2))


def gelu_backward_bytes(config: TransformerConfig, *, slots: int, number_bytes: int) -> int:
    """Returns the most that the backward pass through a GELU block holds, in its second linear layer.

    These are the gradients of GELU's output and of the layer's matrix, and the stream's gradient in the run's type. The
    stream's gradient in FP32 takes the place of the sum that the norm behind it has read.
    """
    width = config.shape["hidden_size"]
    inner = FEED_FORWARD_RATIO * width
    cast = number_bytes * width if number_bytes != FP32_BYTES else 0
    return slots * (cast + number_bytes * inner) + number_bytes * width * inner


def stream_bytes(config: TransformerConfig, *, norms: int) -> int:
    """Returns what each slot keeps of the residual stream: what so many norms read, and dropout's flags for each."""
    flags = MASK_BYTES if config.dropout > 0.0 else 0
    return norms * (FP32_BYTES + flags) * config.shape["hidden_size"]


def rotation_bytes(config: TransformerConfig, *, slots: int) -> int:
    """Returns the sines and cosines of rotary positions, FP32, which all blocks share; 0 for other positions."""
    head_dim = config.shape["hidden_size"] // config.shape["heads"]
    return slots * 2 * FP32_BYTES * head_dim if config.positions == "rotary" else 0
