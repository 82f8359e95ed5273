"""The parts of a transformer on packs: activations are flat, and attention stays within segments.

Shapes: T = slots, C = hidden size, H = heads, D = C / H, S = segments.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from evenpack.kernels.attention import packed_attention
from evenpack.models.common.section import FEED_FORWARD_RATIO

GPT2_NORM_EPSILON = 1e-5
BERT_NORM_EPSILON = 1e-12


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Who attends to whom; the same for each layer of one forward pass."""

    cu_seqlens: Int[Tensor, " S_plus_1"]
    max_sequence_length: int
    causal: bool
    """Whether a slot sees only itself and those before it."""
    alibi_slopes: Float[Tensor, " H"] | None
    """None: positions come from elsewhere."""


class SelfAttention(nn.Module):
    """Each slot reads its own segment: all of it, or itself and what stands before."""

    def __init__(self, hidden_size: int, heads: int, *, dropout: float, backend: str) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.backend = backend
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Float[Tensor, " T C"], segments: Segments) -> Float[Tensor, " T C"]:
        slots, hidden_size = hidden.shape
        query_key_value = self.query_key_value(hidden).view(slots, 3, self.heads, hidden_size // self.heads)
        query, key, value = query_key_value.unbind(1)
        attended = packed_attention(
            query,
            key,
            value,
            segments.cu_seqlens,
            segments.max_sequence_length,
            causal=segments.causal,
            alibi_slopes=segments.alibi_slopes,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        result: Tensor = self.output(attended.flatten(1))
        return result


class FeedForward(nn.Module):
    """Two linear layers around GELU: `none` is its exact form (by erf), `tanh` the approximation of GPT-2."""

    def __init__(self, hidden_size: int, *, gelu: Literal["none", "tanh"]) -> None:
        super().__init__()
        self.gelu = gelu
        self.expand = nn.Linear(hidden_size, FEED_FORWARD_RATIO * hidden_size)
        self.contract = nn.Linear(FEED_FORWARD_RATIO * hidden_size, hidden_size)

    def forward(self, hidden: Float[Tensor, " T C"]) -> Float[Tensor, " T C"]:
        result: Tensor = self.contract(F.gelu(self.expand(hidden), approximate=self.gelu))
        return result


class PreNormBlock(nn.Module):
    """GPT-2's: attention, then feed-forward, each normalised before and added to what came in."""

    def __init__(self, hidden_size: int, heads: int, *, dropout: float, backend: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON)
        self.attention = SelfAttention(hidden_size, heads, dropout=dropout, backend=backend)
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON)
        self.feed_forward = FeedForward(hidden_size, gelu="tanh")
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, " T C"], segments: Segments) -> Float[Tensor, " T C"]:
        attended: Tensor = self.residual_dropout(self.attention(self.attention_norm(hidden), segments))
        hidden = hidden + attended
        transformed: Tensor = self.residual_dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + transformed

    @property
    def residual_outputs(self) -> tuple[nn.Linear, nn.Linear]:
        """The layers whose results are added to the residual stream."""
        return self.attention.output, self.feed_forward.contract


class PostNormBlock(nn.Module):
    """BERT's: attention, then feed-forward, each added to what came in and the sum normalised."""

    def __init__(self, hidden_size: int, heads: int, *, dropout: float, backend: str) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, heads, dropout=dropout, backend=backend)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        self.feed_forward = FeedForward(hidden_size, gelu="none")
        self.feed_forward_norm = nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Float[Tensor, " T C"], segments: Segments) -> Float[Tensor, " T C"]:
        attended: Tensor = self.residual_dropout(self.attention(hidden, segments))
        hidden = self.attention_norm(hidden + attended)
        transformed: Tensor = self.residual_dropout(self.feed_forward(hidden))
        normalised: Tensor = self.feed_forward_norm(hidden + transformed)
        return normalised
