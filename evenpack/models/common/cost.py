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

from evenpack.models.common.memory import LayerBytes
from evenpack.models.common.outline import ModelOutline
from evenpack.models.common.section import FEED_FORWARD_RATIO, TransformerConfig

PASSES = 3
"""Passes over the blocks: one forward, and a backward of twice its work (gradients of inputs and weights)."""


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
    layer_bytes: Callable[..., LayerBytes]
    """(config, *, slots, head_rows, number_bytes): what the layers hold of a micro-batch, with an attention kernel that
    keeps no scores; see `common/memory.py`."""
    outline: Callable[..., ModelOutline] | None = None
    """(config, *, vocabulary_size): the layers, from which the bytes and kernels of a step are counted; None: they are
    not known, and neither is the time of a step on paper."""


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


def gelu_cast_parameters(width: int) -> int:
    """Returns the parameters of a block's linear layers: matrices and biases."""
    return gelu_block_parameters(width) - 2 * layer_norm_parameters(width)
