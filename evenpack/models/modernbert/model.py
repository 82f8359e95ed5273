"""ModernBERT on packs: masked tokens, with windows of attention in most layers.

Shapes: T = slots of the micro-batch, C = hidden size. The head runs at the masked tokens only.

Source: Warner et al. 2024, Smarter, Better, Faster, Longer (arXiv:2412.13663), section 2.1; initial weights as in
transformers' `ModernBertForMaskedLM`, with the decoder tied to the token embedding.
"""

import math

from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import PackedBatch
from evenpack.kernels.segments import Segments
from evenpack.losses import MASKED_TOKEN
from evenpack.models.common.encoder import MaskedTokenHead, PackedEncoder
from evenpack.models.common.layers import GatedFeedForward, PreNormBlock, SelfAttention
from evenpack.models.common.loss_sums import LossOutputs
from evenpack.models.common.positions import Rotation
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.modernbert.config import ModernBertConfig


class ModernBert(PackedEncoder[ModernBertConfig]):
    """Pre-norm transformer encoder whose masked-token decoder is tied to the token embedding."""

    initial_cutoff = 2.0

    def _build(self, attention_backend: str) -> None:
        hidden_size = self.config.shape["hidden_size"]
        self.token_embedding = nn.Embedding(self.vocabulary_size, hidden_size)
        self.embedding_norm = self._norm()
        self.embedding_dropout = nn.Dropout(self.config.dropout)
        self.blocks = nn.ModuleList(
            self._block(attention_backend, window, is_first=layer == 0)
            for layer, window in enumerate(self.config.attention_windows)
        )
        self.final_norm = self._norm()
        self.masked_token_head = MaskedTokenHead(hidden_size, self.vocabulary_size, norm=self._norm(), bias=False)

    def _block(self, attention_backend: str, window: int | None, *, is_first: bool) -> PreNormBlock:
        shape = self.config.shape
        return PreNormBlock(
            attention_norm=nn.Identity() if is_first else self._norm(),  # the embedding has been normalised
            attention=SelfAttention(
                shape["hidden_size"],
                shape["heads"],
                bias=False,
                dropout=self.config.dropout_of_attention,
                backend=attention_backend,
                window=window,
            ),
            feed_forward_norm=self._norm(),
            feed_forward=GatedFeedForward(shape["hidden_size"], shape["feed_forward_size"], activation="gelu"),
            dropout=self.config.dropout,
        )

    def _norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.config.shape["hidden_size"], eps=self.config.norm_epsilon, bias=False)

    def _initial_deviation(self, layer: nn.Module) -> float:
        """Returns less for layers that add to the residual stream, and for the head's."""
        is_shrunk = self._adds_to_stream(layer) or layer is self.masked_token_head.dense
        return INITIAL_DEVIATION / math.sqrt(2 * len(self.blocks)) if is_shrunk else INITIAL_DEVIATION

    def forward(self, batch: PackedBatch) -> LossOutputs:
        """Returns the masked-token loss.

        Raises: ValueError for a batch without its targets; and see `hidden_states`.
        """
        targets = self.chosen_targets(batch, MASKED_TOKEN)
        return {MASKED_TOKEN.name: self.masked_token_loss(self.hidden_states(batch), targets)}

    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        # Layers of one kind share the object, which compiled blocks and recomputation take as it is.
        everything, nearby = (
            Rotation.at(batch.position_ids, head_dim=self.config.head_dim, base=base)
            for base in (self.config.rotary_base, self.config.local_rotary_base)
        )
        rotations = [everything if window is None else nearby for window in self.config.attention_windows]
        segments = Segments.of_batch(batch, causal=False)
        hidden = self._through_blocks(self._embed(self, self.token_embedding(batch.tokens)), segments, rotations)
        return self._normalise(self.final_norm, hidden)

    def _embedded(self, tokens: Float[Tensor, " T C"]) -> Float[Tensor, " T C"]:
        return self.embedding_dropout(self.embedding_norm(tokens))

    @property
    def pooler(self) -> MaskedTokenHead:
        """The layers of the masked-token head, with which transformers' models for tasks begin too."""
        return self.masked_token_head

    @property
    def token_layers(self) -> MaskedTokenHead:
        return self.masked_token_head
