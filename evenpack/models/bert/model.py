"""BERT on packs: masked tokens and next sentences.

Shapes: T = slots of the micro-batch, C = hidden size, M = masked tokens and N = sequences that a micro-batch can
hold. Both heads run at M and N chosen slots only, never at all T.

Source: Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers; layers and names as in its code.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.kernels.segments import Segments
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE
from evenpack.models.bert.config import BertConfig
from evenpack.models.common.encoder import MaskedTokenHead, PackedEncoder, Pooler
from evenpack.models.common.layers import BERT_NORM_EPSILON, PostNormBlock
from evenpack.models.common.loss_sums import LossOutput, LossOutputs
from evenpack.models.common.positions import LearnedPositions

_NEXT_OR_RANDOM = 2
"""Classes of next-sentence prediction: 0 if the second half follows the first, 1 if it comes from elsewhere."""


class NextSentenceHead(nn.Module):
    """The pooler, and the classifier of two classes that reads it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.pooler = Pooler(hidden_size)
        self.classifier = nn.Linear(hidden_size, _NEXT_OR_RANDOM)

    def forward(self, first_tokens: Float[Tensor, " N C"]) -> Float[Tensor, " N 2"]:
        return self.classifier(self.pooler(first_tokens))


class Bert(PackedEncoder[BertConfig]):
    """Post-norm transformer encoder whose masked-token decoder is tied to the token embedding."""

    def _build(self, attention_backend: str) -> None:
        shape = self.config.shape
        hidden_size, dropout = shape["hidden_size"], self.config.dropout
        self.token_embedding = nn.Embedding(self.vocabulary_size, hidden_size)
        self.positions = LearnedPositions(self.max_positions, hidden_size)
        self.token_type_embedding = nn.Embedding(self.config.token_types, hidden_size)
        self.embedding_norm = nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(
                hidden_size,
                shape["heads"],
                dropout=dropout,
                attention_dropout=self.config.dropout_of_attention,
                backend=attention_backend,
            )
            for _ in range(shape["layers"])
        )
        self.masked_token_head = MaskedTokenHead(
            hidden_size, self.vocabulary_size, norm=nn.LayerNorm(hidden_size, eps=BERT_NORM_EPSILON)
        )
        self.next_sentence_head = NextSentenceHead(hidden_size) if self.config.next_sentence else None

    def forward(self, batch: PackedBatch) -> LossOutputs:
        """Returns the masked-token loss and, unless the model has no head for it, the next-sentence loss.

        Raises: ValueError for a batch without their targets; and see `hidden_states`.
        """
        targets = self.chosen_targets(batch, MASKED_TOKEN)
        hidden = self.hidden_states(batch)
        outputs = {MASKED_TOKEN.name: self.masked_token_loss(hidden, targets)}
        if self.next_sentence_head is not None:
            pairs = self.chosen_targets(batch, NEXT_SENTENCE, remedy="set model.next_sentence=false")
            logits = self.next_sentence_head(hidden.index_select(0, pairs.positions))
            outputs[NEXT_SENTENCE.name] = _next_sentence_loss(logits, pairs)
        return outputs

    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        segments = Segments.of_batch(batch, causal=False)
        return self._through_blocks(self._embed(self, *self._rows(batch)), segments, [None] * len(self.blocks))

    def _rows(self, batch: PackedBatch) -> tuple[Float[Tensor, " T C"], Float[Tensor, " T C"], Float[Tensor, " T C"]]:
        """Returns rows of the tables of tokens, types and positions; no name holds them while blocks run."""
        tokens, types = self.token_embedding(batch.tokens), self.token_type_embedding(batch.token_type_ids)
        return tokens, types, self.positions(batch.position_ids, batch.position_rows)

    def _embedded(
        self, tokens: Float[Tensor, " T C"], types: Float[Tensor, " T C"], positions: Float[Tensor, " T C"]
    ) -> Float[Tensor, " T C"]:
        return self.embedding_dropout(self.embedding_norm(tokens + types + positions))

    @property
    def pooler(self) -> Pooler | None:
        return None if self.next_sentence_head is None else self.next_sentence_head.pooler


def _next_sentence_loss(logits: Float[Tensor, " N 2"], targets: ChosenTargets) -> LossOutput:
    """Returns the weighted loss sum in FP32, and how many sequences of weight above zero were classified correctly."""
    labels = targets.labels.long()
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    correct = ((logits.argmax(dim=1) == labels) & (targets.weights > 0)).sum()
    return LossOutput((losses * targets.weights).sum(), correct)
