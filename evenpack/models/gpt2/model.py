"""GPT-2 on packs.

Shapes: T = slots of the micro-batch, C = hidden size, V = vocabulary.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners; initial weights as in its section 2.3.
"""

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import CausalTargets, PackedBatch
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.models.common.layers import GPT2_NORM_EPSILON, PreNormBlock, Segments
from evenpack.models.common.losses import LossSums
from evenpack.models.common.positions import LearnedPositions, alibi_slopes
from evenpack.models.common.transformer import INITIAL_DEVIATION, PackedTransformer
from evenpack.models.gpt2.config import Gpt2Config


class Gpt2(PackedTransformer[Gpt2Config]):
    """Pre-norm transformer decoder with the LM head tied to the token embedding."""

    def _build(self, attention_backend: str) -> None:
        shape = self.config.shape
        hidden_size, dropout = shape["hidden_size"], self.config.dropout
        self.token_embedding = nn.Embedding(self.vocabulary_size, hidden_size)
        self.positions = (
            LearnedPositions(self.max_positions, hidden_size) if self.config.positions == "learned" else None
        )
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(hidden_size, shape["heads"], dropout=dropout, backend=attention_backend)
            for _ in range(shape["layers"])
        )
        self.final_norm = nn.LayerNorm(hidden_size, eps=GPT2_NORM_EPSILON)

    def _initial_deviation(self, layer: nn.Module) -> float:
        """Layers that add to the residual stream have less, so that its variance does not grow with depth."""
        adds_to_stream = any(
            layer is output
            for block in self.blocks
            if isinstance(block, PreNormBlock)
            for output in block.residual_outputs
        )
        return INITIAL_DEVIATION / math.sqrt(2 * len(self.blocks)) if adds_to_stream else INITIAL_DEVIATION

    def forward(self, batch: PackedBatch) -> LossSums:
        """Sum of next-token losses over the batch's targets; logits are never held as a whole.

        Raises: ValueError for a batch with masked targets; and see `hidden_states`.
        """
        targets = batch.targets
        if not isinstance(targets, CausalTargets):
            raise ValueError(
                f"GPT-2 learns from CausalTargets, the batch has {type(targets).__name__}; take a recipe for "
                "next-token prediction (documents, concat), or model.kind: bert"
            )
        loss_sum, correct = linear_cross_entropy(
            self.hidden_states(batch), self.token_embedding.weight, targets.labels, targets.weights
        )
        return LossSums.of_tokens(loss_sum=loss_sum, correct=correct, targets=batch.local_counts.targets)

    def logits(self, batch: PackedBatch) -> Float[Tensor, " T V"]:
        """Scores of the next token at every slot, padding included: T x V numbers at once."""
        return F.linear(self.hidden_states(batch), self.token_embedding.weight)

    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        """Activations after the final norm: what the LM head reads.

        Raises: ValueError if sequences may be longer than the learned position table; BackendError if the attention
        backend cannot serve on this device, dtype, head size, dropout or kind of positions.
        """
        hidden: Tensor = self.token_embedding(batch.tokens)
        slopes = None
        if self.positions is None:
            slopes = alibi_slopes(self.config.shape["heads"], hidden.device)
        else:
            hidden = hidden + self.positions(batch.position_ids, batch.position_rows)
        segments = Segments(
            cu_seqlens=batch.cu_seqlens,
            max_sequence_length=batch.max_sequence_length,
            causal=True,
            alibi_slopes=slopes,
        )
        normalised: Tensor = self.final_norm(self._through_blocks(self.embedding_dropout(hidden), segments))
        return normalised
