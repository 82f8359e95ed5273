"""Scores of all targets of a batch at once, which models themselves never hold: their losses are computed in chunks.

Shapes: T = slots of the micro-batch, V = vocabulary, M = masked tokens and N = sequences that a micro-batch can hold.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from evenpack.batch import PackedBatch
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE
from evenpack.models.bert.model import Bert
from evenpack.models.build import Encoder
from evenpack.models.common.decoder import PackedDecoder


def next_token_logits(model: PackedDecoder, batch: PackedBatch) -> Float[Tensor, " T V"]:
    """Returns scores of the next token at every slot, padding included."""
    return F.linear(model.hidden_states(batch), model.output_weight)


def masked_token_logits(model: Encoder, batch: PackedBatch) -> Float[Tensor, " M V"]:
    """Returns scores of the token at each of the batch's masked positions, unused entries included."""
    positions = model.chosen_targets(batch, MASKED_TOKEN).positions
    rows = model.masked_token_head(model.hidden_states(batch).index_select(0, positions))
    return F.linear(rows, model.token_embedding.weight, model.masked_token_head.decoder_bias)


def next_sentence_logits(model: Bert, batch: PackedBatch) -> Float[Tensor, " N 2"]:
    """Returns scores of both classes for each of the batch's sequences, unused entries included."""
    positions = model.chosen_targets(batch, NEXT_SENTENCE).positions
    return model.next_sentence_head(model.hidden_states(batch).index_select(0, positions))
