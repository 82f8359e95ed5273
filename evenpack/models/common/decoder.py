"""The parts that decoders share: blocks of causal attention, and the next token predicted at every slot.

Shapes: T = slots of the micro-batch, C = hidden size, V = vocabulary.
"""

import math
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import PackedBatch, SlotTargets
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.kernels.segments import Segments
from evenpack.losses import NEXT_TOKEN
from evenpack.models.common.loss_sums import LossOutput, LossOutputs
from evenpack.models.common.positions import LearnedPositions, Rotation, alibi_slopes
from evenpack.models.common.section import DecoderConfig
from evenpack.models.common.transformer import INITIAL_DEVIATION, PackedTransformer

DecoderConfigT = TypeVar("DecoderConfigT", bound=DecoderConfig)


class PackedDecoder(PackedTransformer[DecoderConfigT]):
    """Pre-norm transformer decoder; a family's `_build` makes the layers."""

    positions: LearnedPositions | None
    """The position table; None for positions without one."""
    embedding_dropout: nn.Dropout
    final_norm: nn.Module
    output_head: nn.Linear | None
    """The matrix of the LM head; None: the LM head is the token embedding."""

    def _initial_deviation(self, layer: nn.Module) -> float:
        """Returns less for layers that add to the residual stream, so that its variance does not grow with depth.

        Source: Radford et al. 2019 (GPT-2), section 2.3.
        """
        shrink = math.sqrt(2 * len(self.blocks)) if self._adds_to_stream(layer) else 1.0
        return INITIAL_DEVIATION / shrink

    def forward(self, batch: PackedBatch) -> LossOutputs:
        """Returns the sum of next-token losses over the batch's targets; the logits never exist as a whole.

        Raises: ValueError for a batch without next-token targets; and see `hidden_states`.
        """
        targets = batch.targets.get(NEXT_TOKEN.name)
        if not isinstance(targets, SlotTargets):
            raise ValueError(
                f"{type(self).__name__} learns from targets {NEXT_TOKEN.name}, the batch has "
                f"{', '.join(batch.targets)}; take a recipe for next-token prediction (documents, concat), or a "
                "model.kind of masked tokens"
            )
        loss = linear_cross_entropy(
            self.hidden_states(batch), self.output_weight, targets.labels, targets.weights, compiled=self.is_compiled
        )
        return {NEXT_TOKEN.name: LossOutput(*loss)}

    @property
    def output_weight(self) -> Float[Tensor, " V C"]:
        """Returns the LM head's matrix."""
        return self.token_embedding.weight if self.output_head is None else self.output_head.weight

    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        """Returns the activations after the final norm, which the LM head reads.

        Raises: ValueError if sequences may be longer than the learned position table; BackendError if the attention
        backend cannot serve on this device, dtype, head size, dropout or kind of positions.
        """
        config = self.config
        slopes: Tensor | None = None
        rotation: Rotation | None = None
        if config.positions == "alibi":
            slopes = alibi_slopes(config.shape["heads"], batch.tokens.device)
        if config.positions == "rotary":
            base, scaling = config.rotary_base, config.scaled_rotations
            rotation = Rotation.at(batch.position_ids, head_dim=config.head_dim, base=base, scaling=scaling)
        segments = Segments.of_batch(batch, causal=True, alibi_slopes=slopes)
        hidden = self._through_blocks(self._embed(self, *self._rows(batch)), segments, [rotation] * len(self.blocks))
        return self._normalise(self.final_norm, hidden)

    def _rows(self, batch: PackedBatch) -> tuple[Float[Tensor, " T C"], Float[Tensor, " T C"] | None]:
        """Returns rows of the tables of tokens and positions; no name holds them while blocks run."""
        positions = None if self.positions is None else self.positions(batch.position_ids, batch.position_rows)
        return self.token_embedding(batch.tokens), positions

    def _embedded(
        self, tokens: Float[Tensor, " T C"], positions: Float[Tensor, " T C"] | None
    ) -> Float[Tensor, " T C"]:
        return self.embedding_dropout(tokens if positions is None else tokens + positions)
