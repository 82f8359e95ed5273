"""Pretrained weights in an encoder with the matching tokenizer, and heads for tasks.

Each sequence of a pack has a loss of its own. Shapes: T = slots, C = hidden size, N = sequences that the batch has room
for, K = outputs.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.data.tokenizers.loading import load_tokenizer, tokenizer_of_weights
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.checkpoints.initial_weights import (
    KEY,
    POSITIONS,
    TOKENS,
    naming_key_in_errors,
    require_same_vocabulary,
)
from evenpack.engine.checkpoints.weight_sources import DescribedWeights, find_weights
from evenpack.engine.checkpoints.weights import require_fitting, shapes_of
from evenpack.errors import CheckpointError, ConfigError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.tasks import Prediction
from evenpack.kernels.segments import segment_of_slots
from evenpack.losses import ANSWER_SPAN, SEQUENCE_CLASS, SEQUENCE_SCORE, Loss
from evenpack.models.build import Encoder, new_model
from evenpack.models.common.encoder import PackedEncoder, Pooler
from evenpack.models.common.loss_sums import LossOutput, LossOutputs
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.families import family_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights that have been read, with which each seed begins."""

    origin: str
    """Origin of the weights, for people and for `settings.json`."""
    section: TransformerConfig
    """The `model:` section, with the dropout of this run."""
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    attention_backend: str
    max_positions: int
    """Rows of the learned position table; of a model without one, the positions that its section names, or those of
    the task."""

    def new_encoder(self) -> Encoder:
        """Returns a new copy on the CPU."""
        with torch.device("meta"):
            model = new_model(
                self.section,
                vocabulary_size=len(self.weights[TOKENS]),
                max_positions=self.max_positions,
                attention_backend=self.attention_backend,
            )
        assert isinstance(model, PackedEncoder), "checked when the weights were read"
        expected, found = shapes_of(model.state_dict()), shapes_of(self.weights)
        require_fitting(expected, found, origin=f"{KEY}: {self.origin}", remedy="Name other weights.")
        model.to_empty(device="cpu")
        model.load_state_dict(self.weights)
        return model


def read_pretrained(config: FinetuneConfig) -> Pretrained:
    """Reads the weights that `training.initialize_from` names.

    Raises: ConfigError if it names nothing, or a model that is not an encoder; CheckpointError if there are no readable
    weights, or weights of too few positions or of another vocabulary; DataError without a tokenizer.
    """
    path = config.training.initialize_from
    if path is None:
        raise ConfigError(
            f"fine-tuning starts from pretrained weights: give {KEY}=PATH, a run's output_dir, one checkpoint or a "
            "folder of transformers"
        )
    with naming_key_in_errors():
        found = find_weights(path)
        if not isinstance(found, DescribedWeights):
            raise CheckpointError(
                f"{found} does not describe its model: begin a run with it (`evenpack train`), or have it "
                "converted for transformers, and name that run or folder"
            )
        section, weights = found.read_described()
    family = family_of(section)
    if not issubclass(family.load_model(), PackedEncoder):
        raise ConfigError(
            f"{KEY}: {found} is of family '{family.name}', whose tokens see only earlier tokens; fine-tuning "
            "is for encoders"
        )
    tokenizer = _tokenizer(config, found)
    table = weights.get(POSITIONS)
    longest = config.data.max_sequence_length
    positions = len(table) if table is not None else max(section.max_positions or 0, longest)
    if positions < longest:
        raise CheckpointError(
            f"{KEY}: {found} has {positions} positions, and data.max_sequence_length is {longest}: lower that, or name "
            "weights that were trained with more"
        )
    _require_equal_size(found, weights, tokenizer)
    if config.data.tokenizer is not None:
        require_same_vocabulary(found, tokenizer, of="data.tokenizer", remedy="Leave data.tokenizer out")
    return Pretrained(
        origin=str(found),
        section=section.model_copy(update={"dropout": config.training.dropout, "attention_dropout": None}),
        weights=weights,
        tokenizer=tokenizer,
        attention_backend=config.attention.backend,
        max_positions=positions,
    )


def _tokenizer(config: FinetuneConfig, found: DescribedWeights) -> Tokenizer:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    log.info("tokenizer of the weights, from %s", found.tokenizer_dir)
    return tokenizer_of_weights(found.tokenizer_dir)


def _require_equal_size(found: DescribedWeights, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    vocabulary = len(weights[TOKENS])
    if tokenizer.vocabulary_size != vocabulary:
        raise CheckpointError(
            f"{KEY}: {found} has a vocabulary of {vocabulary} entries, the tokenizer one of "
            f"{tokenizer.vocabulary_size}: give the tokenizer of these weights as data.tokenizer"
        )


class Head(nn.Module, ABC):
    """Maps activations to outputs, and outputs to the loss of each sequence."""

    reads: ClassVar[Literal["sequence", "span"]]
    """Unit of an output, or set of outputs: a sequence, or each of its tokens."""
    loss: ClassVar[Loss]
    """The loss that it learns from; a batch has the labels of its sequences under this name."""

    @abstractmethod
    def forward(self, hidden: Float[Tensor, " T C"], batch: PackedBatch) -> Float[Tensor, " rows K"]:
        """Returns outputs of each sequence (rows = N) or of each slot (rows = T)."""

    @abstractmethod
    def sequence_losses(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> Float[Tensor, " N"]:
        """Returns the loss of each sequence in FP32; 0 beyond the last one."""

    @abstractmethod
    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> tuple[Tensor, ...]:
        """Returns the outputs of each sequence: [K], or [length, K]."""

    def targets(self, batch: PackedBatch) -> ChosenTargets:
        """Returns the batch's targets of this head's loss."""
        targets = batch.targets[self.loss.name]
        assert isinstance(targets, ChosenTargets), "labels belong to chosen slots"
        return targets


class SequenceHead(Head):
    """One set of outputs for each sequence, from its first token through the pooler.

    Args:
        encoder: its pooler, if it has one, becomes part of the head.
        outputs: K.
        dropout: before the new layer.
    """

    reads = "sequence"

    def __init__(self, encoder: Encoder, *, outputs: int, dropout: float) -> None:
        super().__init__()
        hidden_size = encoder.config.shape["hidden_size"]
        self.pooler = Pooler(hidden_size) if encoder.pooler is None else encoder.pooler
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, outputs)

    def forward(self, hidden: Float[Tensor, " T C"], batch: PackedBatch) -> Float[Tensor, " rows K"]:
        pooled = self.pooler(hidden.index_select(0, self.targets(batch).positions))
        return self.classifier(self.dropout(pooled))

    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> tuple[Tensor, ...]:
        return outputs[: batch.local_counts.sequences].unbind(0)


class ClassHead(SequenceHead):
    """One of K classes; the loss is the cross-entropy."""

    loss = SEQUENCE_CLASS

    def sequence_losses(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> Float[Tensor, " N"]:
        targets = self.targets(batch)
        return F.cross_entropy(outputs.float(), targets.labels, reduction="none") * targets.weights


class ScoreHead(SequenceHead):
    """A number; the loss is the squared error."""

    loss = SEQUENCE_SCORE

    def sequence_losses(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> Float[Tensor, " N"]:
        targets = self.targets(batch)
        return F.mse_loss(outputs.float().squeeze(1), targets.labels, reduction="none") * targets.weights


class SpanHead(Head):
    """Two numbers for each token; the loss is the mean of two cross-entropies over a sequence's tokens.

    One is for the answer's first token, the other for its last.

    Args:
        encoder: its layers for tokens, if it has some, become part of the head.
        dropout: before the new layer, if the encoder has layers for tokens.
    """

    reads = "span"
    loss = ANSWER_SPAN

    def __init__(self, encoder: Encoder, *, dropout: float) -> None:
        super().__init__()
        layers = encoder.token_layers
        self.token_layers = nn.Identity() if layers is None else nn.Sequential(layers, nn.Dropout(dropout))
        self.classifier = nn.Linear(encoder.config.shape["hidden_size"], 2)

    def forward(self, hidden: Float[Tensor, " T C"], batch: PackedBatch) -> Float[Tensor, " rows K"]:
        return self.classifier(self.token_layers(hidden))

    def sequence_losses(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> Float[Tensor, " N"]:
        targets = self.targets(batch)
        segments = segment_of_slots(batch.cu_seqlens, batch.slots)
        log_shares = segment_log_softmax(outputs.float(), segments, segments=len(batch.cu_seqlens) - 1)
        losses: Tensor = -log_shares[targets.positions, targets.labels] * targets.weights
        return losses.view(-1, 2).sum(dim=1)

    def by_sequence(self, outputs: Float[Tensor, " rows K"], batch: PackedBatch) -> tuple[Tensor, ...]:
        answers = self.targets(batch).positions[: 2 * batch.local_counts.sequences : 2]
        segments = segment_of_slots(batch.cu_seqlens, batch.slots)[answers]
        bounds = zip(batch.cu_seqlens[segments].tolist(), batch.cu_seqlens[segments + 1].tolist(), strict=True)
        return tuple(outputs[start:end] for start, end in bounds)


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

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The loss of the head."""
        return (self.head.loss,)

    def forward(self, batch: PackedBatch) -> LossOutputs:
        """Returns the loss of the head."""
        losses = self.head.sequence_losses(self.outputs(batch), batch)
        return {self.head.loss.name: LossOutput(losses.sum(), None)}

    def outputs(self, batch: PackedBatch) -> Float[Tensor, " rows K"]:
        """Returns the head's outputs."""
        return cast(Tensor, self.head(self.encoder.hidden_states(batch), batch))


HEADS: dict[Prediction, type[ClassHead] | type[ScoreHead] | type[SpanHead]] = {
    "class": ClassHead,
    "score": ScoreHead,
    "span": SpanHead,
}
"""The head for each kind of prediction."""


def new_head(encoder: Encoder, predicts: Prediction, *, outputs: int, dropout: float, seed: int) -> Head:
    """Returns the head for a kind of prediction; the weights of its new layers depend on `seed` alone.

    Args:
        encoder: its pooler, or its layers for tokens, become part of the head.
        outputs: number for each sequence; a span has two for each token.
        dropout: before the new layer.
    """
    kind = HEADS[predicts]
    if issubclass(kind, SequenceHead):
        head: Head = kind(encoder, outputs=outputs, dropout=dropout)
    else:
        head = kind(encoder, dropout=dropout)
    generator, pretrained = torch.Generator().manual_seed(seed), set(encoder.modules())
    for layer in head.modules():
        if isinstance(layer, nn.Linear) and layer not in pretrained:
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
