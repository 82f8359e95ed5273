"""The parts of a transformer on packs: activations are flat, and attention stays within segments.

Shapes: T = slots, C = hidden size, H = heads, G = key/value heads, D = C / H, F = width of the feed-forward layer,
S = segments.
"""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evenpack.kernels.attention import packed_attention
from evenpack.kernels.segments import Segments
from evenpack.models.common.positions import Rotation
from evenpack.models.common.section import FEED_FORWARD_RATIO

GPT2_NORM_EPSILON = 1e-5
BERT_NORM_EPSILON = 1e-12


class MergedLinear(nn.Linear):
    """Several linear layers of one input, computed as one; LAMB gives each a trust ratio of its own.

    Args:
        in_features: width of the input.
        parts: outputs of each layer, in order.
        bias: whether each has one.
    """

    def __init__(self, in_features: int, parts: Sequence[int], *, bias: bool = True) -> None:
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = tuple(parts)

    def separately(self, inputs: Float[Tensor, " T C"]) -> tuple[Tensor, ...]:
        """Returns the output of each layer: [T, part]."""
        return self.divide(self(inputs))

    def divide(self, outputs: Float[Tensor, " T parts"]) -> tuple[Tensor, ...]:
        """Returns the part of each layer in the outputs of all."""
        return outputs.split_with_sizes(self.parts, dim=1)


class SelfAttention(nn.Module):
    """Attention in which each slot reads its own segment: all of it or a window, or of that itself and earlier slots.

    Args:
        hidden_size: C.
        heads: H, a divisor of C.
        key_value_heads: G, a divisor of H; None: H.
        bias: of the projections.
        dropout: of attention probabilities.
        backend: as `packed_attention` takes it.
        window: tokens on each side that a slot reads, besides itself; None: all of its segment.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        key_value_heads: int | None = None,
        bias: bool = True,
        dropout: float,
        backend: str,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.head_dim = hidden_size // heads
        self.dropout = dropout
        self.backend = backend
        key_value_size = (key_value_heads or heads) * self.head_dim
        self.query_key_value = MergedLinear(hidden_size, (hidden_size, key_value_size, key_value_size), bias=bias)
        self.output = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(
        self, hidden: Float[Tensor, " T C"], segments: Segments, rotation: Rotation | None
    ) -> Float[Tensor, " T C"]:
        outputs: Tensor = self.query_key_value(hidden)
        parts = (outputs, *self.query_key_value.divide(outputs))
        merged, query, key, value = (part.view(len(hidden), -1, self.head_dim) for part in parts)
        if rotation is not None:
            query, key = rotation.turn(query), rotation.turn(key)
        attended = packed_attention(
            query,
            key,
            value,
            segments,
            dropout=self.dropout if self.training else 0.0,
            window=self.window,
            backend=self.backend,
            merged=merged if rotation is None else None,
        )
        return self.output(attended.flatten(1))


class FeedForward(nn.Module):
    """Two linear layers around GELU: `none` is its exact form (by erf), `tanh` the approximation of GPT-2."""

    def __init__(self, hidden_size: int, *, gelu: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.gelu = gelu
        self.expand = nn.Linear(hidden_size, FEED_FORWARD_RATIO * hidden_size)
        self.contract = nn.Linear(FEED_FORWARD_RATIO * hidden_size, hidden_size)

    def forward(self, hidden: Float[Tensor, " T C"]) -> Float[Tensor, " T C"]:
        return self.contract(F.gelu(self.expand(hidden), approximate=self.gelu))


class GatedFeedForward(nn.Module):
    """A linear layer times the activation of another, and a third one back to the hidden size; no biases.

    The activation is SiLU (SwiGLU) or the exact GELU (GeGLU).

    Source: Shazeer 2020, GLU Variants Improve Transformer (arXiv:2002.05202), equation 6.
    """

    def __init__(self, hidden_size: int, inner_size: int, *, activation: Literal["silu", "gelu"]) -> None:
        super().__init__()
        self.activation = F.silu if activation == "silu" else F.gelu
        self.expand = MergedLinear(hidden_size, (inner_size, inner_size), bias=False)
        self.contract = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, hidden: Float[Tensor, " T C"]) -> Float[Tensor, " T C"]:
        gate, values = self.expand.separately(hidden)
        return self.contract(self.activation(gate) * values)


class PreNormBlock(nn.Module):
    """Attention, then feed-forward, each with its input normalised and its output added to the residual stream."""

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: SelfAttention,
        feed_forward_norm: nn.Module,
        feed_forward: FeedForward | GatedFeedForward,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.residual_dropout = nn.Dropout(dropout)

    def forward(
        self, hidden: Float[Tensor, " T C"], segments: Segments, rotation: Rotation | None
    ) -> Float[Tensor, " T C"]:
        attended: Tensor = self.residual_dropout(self.attention(self.attention_norm(hidden), segments, rotation))
        hidden = hidden + attended
        transformed: Tensor = self.residual_dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + transformed

    @property
    def residual_outputs(self) -> tuple[nn.Linear, nn.Linear]:
        """The layers whose results are added to the residual stream."""
        return self.attention.output, self.feed_forward.contract


class PostNormBlock(nn.Module):
    """BERT's block: attention, then feed-forward, each output added to its input and the sum normalised.

    Norms are FP32 under autocast on CUDA; their results get the type of the block's input.
    """

    def __init__(self, hidden_size: int, heads: int, *, dropout: float, attention_dropout: float, backend: str) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, heads, dropout=attention_dropout, backend=backend)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        self.feed_forward = FeedForward(hidden_size, gelu="none")
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(
        self, hidden: Float[Tensor, " T C"], segments: Segments, rotation: Rotation | None
    ) -> Float[Tensor, " T C"]:
        attended: Tensor = self.residual_dropout(self.attention(hidden, segments, rotation))
        hidden = self.attention_norm(hidden + attended).to(hidden.dtype)
        transformed: Tensor = self.residual_dropout(self.feed_forward(hidden))
        return self.feed_forward_norm(hidden + transformed).to(hidden.dtype)
