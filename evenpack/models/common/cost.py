"""Parts that the cost formulas of all families share; needs no torch.

Conventions, so that a reported MFU can be checked by hand:

- Matrix products only, 2 m n k operations each; norms, softmax, activations, rotations, dropout and embedding look-ups
  are left out.
- The backward pass is twice the forward pass. Work done again to save memory (activation checkpointing, attention
  scores and logits recomputed by fused kernels) is not counted, because it brings no progress.
- Causal attention counts the pairs (i, j) with j <= i of one segment: l (l + 1) / 2 for length l, not l².
  Bidirectional attention counts all l².
- An output head counts where a loss is taken: the masked-token head at the masked tokens, the pooler and the
  next-sentence head at each sequence's first token.
- Tokens that only pad a sequence are not useful work, including their attended pairs, and the head if they are targets.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from evenpack.models.common.section import FEED_FORWARD_RATIO, TransformerConfig

PASSES = 3
"""Passes over the blocks: one forward, and a backward of twice its work (gradients of inputs and weights)."""

FP32_BYTES, BF16_BYTES, MASK_BYTES = 4, 2, 1
"""Bytes of a number, and of a flag for a number that dropout set to zero."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The amount of data that goes through the model; adds up over micro-batches, ranks and steps."""

    slots: int
    """Positions that go through the blocks; each is in exactly one segment."""
    squared_lengths: int
    """Sum of length² over those segments."""
    head_slots: int
    """Positions whose logits are computed."""
    sequences: int
    """First tokens that go through the pooler and the next-sentence head, where the model has them."""

    def __add__(self, other: "Work") -> "Work":
        return Work(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    def attended_pairs(self, *, causal: bool) -> int:
        """Returns the pairs of positions of which one sees the other: sum of l (l + 1) / 2, or of l²."""
        return (self.squared_lengths + self.slots) // 2 if causal else self.squared_lengths


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """A family's cost formulas; the first argument of each is the `model:` section."""

    parameter_count: Callable[..., int]
    """(config, *, vocabulary_size, max_positions): the number of trained parameters; a tied matrix counts once."""
    step_flops: Callable[..., int]
    """(config, *, vocabulary_size, work): operations of forward and backward."""
    activation_bytes: Callable[..., int]
    """(config, *, slots, head_rows): what autograd keeps of a micro-batch for the backward pass, under bf16 autocast
    and with an attention kernel that keeps no scores."""


def attention_flops(config: TransformerConfig, work: Work, *, causal: bool) -> int:
    """Returns the operations of the forward pass: scores and the weighted sums of values, in all layers and heads."""
    return 2 * (2 * config.shape["layers"] * config.shape["hidden_size"] * work.attended_pairs(causal=causal))


def gelu_block_weights(width: int) -> int:
    """Returns the elements of a block's matrices: query, key, value, output, and the two of the feed-forward layer."""
    return (3 + 1 + 2 * FEED_FORWARD_RATIO) * width * width


def gelu_block_parameters(width: int) -> int:
    """Returns the parameters of a block with biases and two norms."""
    biases = (3 + 1 + FEED_FORWARD_RATIO + 1) * width
    return gelu_block_weights(width) + biases + 2 * layer_norm_parameters(width)


def layer_norm_parameters(width: int) -> int:
    """Returns the parameters of a LayerNorm: gain and bias."""
    return 2 * width


def gelu_activation_bytes(config: TransformerConfig, *, slots: int, head_rows: int) -> int:
    """Returns the activations of GELU blocks and of a head with a dense layer and a norm before the logits."""
    has_dropout = config.dropout > 0.0
    head = BF16_BYTES + BF16_BYTES + FP32_BYTES + BF16_BYTES + FP32_BYTES
    # inputs of the dense layer, GELU, norm and decoder, and the gradient of the last
    width = config.shape["hidden_size"]
    block = width * gelu_block_bytes_per_channel(has_dropout=has_dropout)
    if config.positions == "rotary":
        block += rotation_bytes(query_size=width, key_size=width)
    return slots * stream_bytes(config, block) + head_rows * width * head


def rotation_bytes(*, query_size: int, key_size: int) -> int:
    """Returns what rotation adds to a slot of a block: rotated queries and keys; the projections stay alive as well."""
    return BF16_BYTES * (query_size + key_size)


def stream_bytes(config: TransformerConfig, block: int) -> int:
    """Returns what embedding and blocks keep of one slot, where one block keeps `block`."""
    layers, width = config.shape["layers"], config.shape["hidden_size"]
    embedding = width * (FP32_BYTES + (MASK_BYTES if config.dropout > 0.0 else 0))
    if config.activation_checkpointing:
        return layers * width * FP32_BYTES + block + embedding  # the blocks' inputs, and one block at a time
    return layers * block + embedding


def gelu_block_bytes_per_channel(*, has_dropout: bool) -> int:
    """Returns what a block keeps of one slot for its backward pass, divided by C.

    These are the input of attention's projections, their three outputs and attention's output; the input of the
    feed-forward layer, and GELU's input and output; the sums that the two norms read, in FP32; and the flags of two
    dropouts.
    """
    attention = BF16_BYTES * (1 + 3 + 1)
    feed_forward = BF16_BYTES * (1 + FEED_FORWARD_RATIO + FEED_FORWARD_RATIO)
    norms = 2 * FP32_BYTES
    return attention + feed_forward + norms + (2 * MASK_BYTES if has_dropout else 0)
