"""GPT-2 on packs.

Shapes: T = slots of the micro-batch, C = hidden size, V = vocabulary. There is no batch dimension: `cu_seqlens` says
where each segment ends, and nothing else in the model mixes slots.

Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners; initial weights as in its section 2.3.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenpack.batch import PackedBatch
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.models.layers import NORM_EPSILON, PreNormBlock, Segments
from evenpack.models.losses import LossSums
from evenpack.models.model_config import Gpt2Config
from evenpack.models.positions import LearnedPositions, alibi_slopes

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights."""


class Gpt2(nn.Module):
    """Pre-norm transformer decoder with the LM head tied to the token embedding.

    Args:
        config: shape, kind of positions, dropout, activation checkpointing.
        vocabulary_size: V; rows of the token embedding.
        max_positions: rows of the learned position table; ALiBi has none and ignores it.
        attention_backend: `auto` or a name of `evenpack.kernels`; matched to the device and dtype when called.
        seed: of the initial weights, which depend on nothing else: each rank and each device gets the same.

    Built under `torch.device("meta")` it has shapes only, at no cost of memory; then `to_empty` and `initialize`,
    or load weights.
    """

    def __init__(
        self,
        config: Gpt2Config,
        *,
        vocabulary_size: int,
        max_positions: int,
        attention_backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.max_positions = max_positions
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initial values would cost time and draw from its global random state
            self._build(attention_backend)
        if device.type != "meta":
            self.to_empty(device=device)
            self.initialize(seed)

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
        self.final_norm = nn.LayerNorm(hidden_size, eps=NORM_EPSILON)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws all weights anew from `seed`: normal, biases zero, norms one.

        Layers that add to the residual stream are scaled by 1 / sqrt(2 * layers), so that its variance does not grow
        with depth. Numbers are drawn on the CPU and copied, because devices draw differently from one seed.
        """
        generator = torch.Generator(device="cpu").manual_seed(seed)
        blocks = [module for module in self.modules() if isinstance(module, PreNormBlock)]
        residual_outputs = {layer for block in blocks for layer in block.residual_outputs}
        residual_deviation = INITIAL_DEVIATION / math.sqrt(2 * len(blocks))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                deviation = residual_deviation if module in residual_outputs else INITIAL_DEVIATION
                drawn = torch.empty(module.weight.shape, device="cpu", dtype=torch.float32)
                module.weight.copy_(drawn.normal_(0.0, deviation, generator=generator))
            if isinstance(module, nn.Linear):
                module.bias.zero_()
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, batch: PackedBatch) -> LossSums:
        """Sum of next-token losses over the batch's targets; logits are never held as a whole."""
        loss_sum, correct = linear_cross_entropy(
            self.hidden_states(batch), self.token_embedding.weight, batch.targets.labels, batch.targets.weights
        )
        return LossSums(loss_sum=loss_sum, correct=correct, targets=batch.local_counts.targets)

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
            hidden = hidden + self.positions(batch.position_ids, batch.max_sequence_length)
        hidden = self.embedding_dropout(hidden)
        segments = Segments(
            cu_seqlens=batch.cu_seqlens, max_sequence_length=batch.max_sequence_length, alibi_slopes=slopes
        )
        for block in self.blocks:
            hidden = self._run(block, hidden, segments)
        normalised: Tensor = self.final_norm(hidden)
        return normalised

    def _run(self, block: nn.Module, hidden: Float[Tensor, " T C"], segments: Segments) -> Float[Tensor, " T C"]:
        """One block; with activation checkpointing only its input is kept for the backward pass."""
        if not (self.config.activation_checkpointing and self.training and torch.is_grad_enabled()):
            result: Tensor = block(hidden, segments)
            return result
        # Saving the random state makes the device wait; only dropout needs it.
        recomputed: Tensor = checkpoint(
            block, hidden, segments, use_reentrant=False, preserve_rng_state=self.config.dropout > 0.0
        )
        return recomputed
