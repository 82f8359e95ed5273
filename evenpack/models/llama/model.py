"""Llama on packs.

Source: Touvron et al. 2023, LLaMA (arXiv:2302.13971), section 2.2, and Llama 2 (arXiv:2307.09288), section 2.2, for
grouped queries. Neither names initial weights: these are GPT-2's.
"""

from torch import nn

from evenpack.models.common.decoder import PackedDecoder
from evenpack.models.common.layers import GatedFeedForward, PreNormBlock, SelfAttention
from evenpack.models.llama.config import LlamaConfig


class Llama(PackedDecoder[LlamaConfig]):
    """Pre-norm transformer decoder with rotary positions."""

    def _build(self, attention_backend: str) -> None:
        hidden_size = self.config.shape["hidden_size"]
        self.token_embedding = nn.Embedding(self.vocabulary_size, hidden_size)
        self.positions = None
        self.embedding_dropout = nn.Dropout(self.config.dropout)
        self.blocks = nn.ModuleList(self._block(attention_backend) for _ in range(self.config.shape["layers"]))
        self.final_norm = self._norm()
        self.output_head = None if self.config.tied_head else nn.Linear(hidden_size, self.vocabulary_size, bias=False)

    def _block(self, attention_backend: str) -> PreNormBlock:
        shape, dropout = self.config.shape, self.config.dropout
        return PreNormBlock(
            attention_norm=self._norm(),
            attention=SelfAttention(
                shape["hidden_size"],
                shape["heads"],
                key_value_heads=shape["key_value_heads"],
                bias=False,
                dropout=self.config.dropout_of_attention,
                backend=attention_backend,
            ),
            feed_forward_norm=self._norm(),
            feed_forward=GatedFeedForward(shape["hidden_size"], shape["feed_forward_size"], activation="silu"),
            dropout=dropout,
        )

    def _norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.config.shape["hidden_size"], eps=self.config.norm_epsilon)
