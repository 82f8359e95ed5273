"""Heads of an encoder for tasks. Each sequence of a pack has a loss of its own.

Shapes: T = slots, C = hidden size, N = sequences of the batch, K = outputs.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from evenpack.finetuning.batches import FinetuneBatch
from evenpack.finetuning.tasks import Prediction
from evenpack.models.build import Encoder
from evenpack.models.common.transformer import INITIAL_DEVIATION


class Head(nn.Module, ABC):
    """Maps activations to outputs, and outputs to the loss of each sequence."""

    reads: ClassVar[Literal["sequence", "span"]]
    """Unit of an output, or set of outputs: a sequence, or each of its tokens."""

    @abstractmethod
    def forward(self, hidden: Float[Tensor, " T C"], batch: FinetuneBatch) -> Float[Tensor, " rows K"]:
        """Returns outputs of each sequence (rows = N) or of each slot (rows = T)."""

    @abstractmethod
    def losses(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> Float[Tensor, " N"]:
        """Returns the loss of each sequence, in FP32."""

    @abstractmethod
    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> tuple[Tensor, ...]:
        """Returns the outputs of each sequence: [K], or [length, K]."""


class SequenceHead(Head):
    """One set of outputs for each sequence, from its first token through the pooler.

    Args:
        pooler: the encoder's own; None: a new one.
        hidden_size: C.
        outputs: K.
        dropout: before the new layer.
    """

    reads = "sequence"

    def __init__(self, pooler: nn.Linear | None, *, hidden_size: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.pooler = nn.Linear(hidden_size, hidden_size) if pooler is None else pooler
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, outputs)

    def forward(self, hidden: Float[Tensor, " T C"], batch: FinetuneBatch) -> Float[Tensor, " rows K"]:
        pooled = self.pooler(hidden.index_select(0, batch.sequence_starts)).tanh()
        outputs: Tensor = self.classifier(self.dropout(pooled))
        return outputs

    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> tuple[Tensor, ...]:
        return outputs.unbind(0)


class ClassHead(SequenceHead):
    """One of K classes; the loss is the cross-entropy."""

    def losses(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> Float[Tensor, " N"]:
        return F.cross_entropy(outputs.float(), batch.labels, reduction="none")


class ScoreHead(SequenceHead):
    """A number; the loss is the squared error."""

    def losses(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> Float[Tensor, " N"]:
        return F.mse_loss(outputs.float().squeeze(1), batch.labels, reduction="none")


class SpanHead(Head):
    """Two numbers for each token; the loss is the mean of two cross-entropies over a sequence's tokens.

    One is that of the answer's first token, the other that of its last.

    Args:
        hidden_size: C.
    """

    reads = "span"

    def __init__(self, *, hidden_size: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(hidden_size, 2)

    def forward(self, hidden: Float[Tensor, " T C"], batch: FinetuneBatch) -> Float[Tensor, " rows K"]:
        outputs: Tensor = self.classifier(hidden)
        return outputs

    def losses(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> Float[Tensor, " N"]:
        sequences = len(batch.sequence_starts)
        log_shares = segment_log_softmax(outputs.float(), batch.sequence_of_slot, segments=sequences + 1)
        return -log_shares.gather(0, batch.labels).mean(dim=1)

    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: FinetuneBatch) -> tuple[Tensor, ...]:
        own = outputs[batch.sequence_of_slot < len(batch.sequence_starts)]
        parts: tuple[Tensor, ...] = torch.split(own, batch.lengths.tolist())
        return parts


class FinetunedModel(nn.Module):
    """An encoder under a head.

    Args:
        encoder: pretrained.
        head: new.
    """

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, batch: FinetuneBatch) -> Float[Tensor, " rows K"]:
        """Returns the head's outputs."""
        return cast(Tensor, self.head(self.encoder.hidden_states(batch), batch))

    def losses(self, batch: FinetuneBatch) -> Float[Tensor, " N"]:
        """Returns the loss of each sequence of the batch."""
        return self.head.losses(self(batch), batch)


def new_head(encoder: Encoder, predicts: Prediction, *, outputs: int, dropout: float, seed: int) -> Head:
    """Returns the head for a kind of prediction; the weights of its new layers depend on `seed` alone.

    Args:
        encoder: its pooler becomes part of the head.
        outputs: number for each sequence; a span has two for each token.
        dropout: before the new layer.
    """
    size = encoder.config.shape["hidden_size"]
    if predicts == "span":
        head: Head = SpanHead(hidden_size=size)
    else:
        kind = ClassHead if predicts == "class" else ScoreHead
        head = kind(encoder.pooler, hidden_size=size, outputs=outputs, dropout=dropout)
    generator = torch.Generator().manual_seed(seed)
    for layer in head.modules():
        if isinstance(layer, nn.Linear) and layer is not encoder.pooler:
            nn.init.normal_(layer.weight, std=INITIAL_DEVIATION, generator=generator)
            nn.init.zeros_(layer.bias)
    return head


def segment_log_softmax(
    values: Float[Tensor, " T K"], segment_of_slot: Int[Tensor, " T"], *, segments: int
) -> Float[Tensor, " T K"]:
    """Returns the logarithm of the softmax over the slots of each segment, column by column."""
    index = segment_of_slot[:, None].expand_as(values)
    lowest = values.new_full((segments, values.shape[1]), -torch.inf)
    greatest = lowest.scatter_reduce(0, index, values.detach(), "amax")
    shifted = values - greatest.gather(0, index)
    totals = torch.zeros_like(lowest).scatter_add(0, index, shifted.exp())
    return shifted - totals.log().gather(0, index)
