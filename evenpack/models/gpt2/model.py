"""GPT-2 on packs.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners; initial weights as in its section 2.3.
"""

from torch import nn

from evenpack.models.common.decoder import PackedDecoder
from evenpack.models.common.layers import GPT2_NORM_EPSILON, FeedForward, PreNormBlock, SelfAttention
from evenpack.models.common.positions import LearnedPositions
from evenpack.models.gpt2.config import Gpt2Config


class Gpt2(PackedDecoder[Gpt2Config]):
    """Pre-norm transformer decoder with the LM head tied to the token embedding."""

    def _build(self, attention_backend: str) -> None:
        hidden_size = self.config.shape["hidden_size"]
        self.token_embedding = nn.Embedding(self.vocabulary_size, hidden_size)
        self.positions = (
            LearnedPositions(self.max_positions, hidden_size) if self.config.positions == "learned" else None
        )
        self.embedding_dropout = nn.Dropout(self.config.dropout)
        self.blocks = nn.ModuleList(self._block(attention_backend) for _ in range(self.config.shape["layers"]))
        self.final_norm = nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON)
        self.output_head = None

    def _block(self, attention_backend: str) -> PreNormBlock:
        hidden_size, dropout = self.config.shape["hidden_size"], self.config.dropout
        heads = self.config.shape["heads"]
        return PreNormBlock(
            attention_norm=nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON),
            attention=SelfAttention(
                hidden_size, heads, dropout=self.config.dropout_of_attention, backend=attention_backend
            ),
            feed_forward_norm=nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON),
            feed_forward=FeedForward(hidden_size, gelu="tanh"),
            dropout=dropout,
        )
