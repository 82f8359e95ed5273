"""Pretrained weights in an encoder with the matching tokenizer, and heads for tasks.

Each sequence of a pack has a loss of its own. Shapes: T = slots, C = hidden size, N = sequences of the batch, K =
outputs.
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

from evenpack.data.tokenizers.loading import first_difference, load_tokenizer, read_vocabulary, tokenizer_of_weights
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.checkpoints.initial_weights import KEY, naming_key_in_errors
from evenpack.engine.checkpoints.weight_origins import DescribedWeights, find_weights
from evenpack.engine.checkpoints.weights import require_fitting
from evenpack.errors import CheckpointError, ConfigError
from evenpack.finetuning.batches import FinetuneBatch
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.tasks import Prediction
from evenpack.models.build import Encoder, new_model
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import INITIAL_DEVIATION
from evenpack.models.families import family_of

log = logging.getLogger(__name__)

_TOKENS = "token_embedding.weight"
_POSITIONS = "positions.table.weight"


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

    def new_encoder(self) -> Encoder:
        """Returns a new copy on the CPU."""
        rows = {name: len(self.weights[name]) for name in (_TOKENS, _POSITIONS)}
        with torch.device("meta"):
            model = new_model(
                self.section,
                vocabulary_size=rows[_TOKENS],
                max_positions=rows[_POSITIONS],
                attention_backend=self.attention_backend,
            )
        assert isinstance(model, PackedEncoder), "checked when the weights were read"
        require_fitting(model.state_dict(), self.weights, origin=f"{KEY}: {self.origin}", remedy="Name other weights.")
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
    _require_sizes(config, found, weights, tokenizer)
    _require_same_words(found, tokenizer)
    return Pretrained(
        origin=str(found),
        section=section.model_copy(update={"dropout": config.training.dropout, "attention_dropout": None}),
        weights=weights,
        tokenizer=tokenizer,
        attention_backend=config.attention.backend,
    )


def _tokenizer(config: FinetuneConfig, found: DescribedWeights) -> Tokenizer:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    log.info("tokenizer of the weights, from %s", found.tokenizer_dir)
    return tokenizer_of_weights(found.tokenizer_dir)


def _require_sizes(
    config: FinetuneConfig, found: DescribedWeights, weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    positions, vocabulary = len(weights[_POSITIONS]), len(weights[_TOKENS])
    if positions < config.data.max_sequence_length:
        raise CheckpointError(
            f"{KEY}: {found} has {positions} positions, and data.max_sequence_length is "
            f"{config.data.max_sequence_length}: lower that, or name weights that were trained with more"
        )
    if tokenizer.vocabulary_size != vocabulary:
        raise CheckpointError(
            f"{KEY}: {found} has a vocabulary of {vocabulary} entries, the tokenizer one of "
            f"{tokenizer.vocabulary_size}: give the tokenizer of these weights as data.tokenizer"
        )


def _require_same_words(found: DescribedWeights, tokenizer: Tokenizer) -> None:
    """Compares the vocabularies, because equal sizes may still have other tokens."""
    trained_with = read_vocabulary(found.tokenizer_dir)
    difference = None if trained_with is None else first_difference(trained_with, tokenizer.vocabulary)
    if difference is not None:
        raise CheckpointError(
            f"{KEY}: {found} was trained with another vocabulary, in {found.tokenizer_dir}, than data.tokenizer has: "
            f"{difference}. Leave data.tokenizer out"
        )


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
