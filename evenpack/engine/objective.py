"""What a run asks of its model, and what it divides the losses by."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evenpack.batch import StepCounts
from evenpack.data.masking import masked_count
from evenpack.data.objectives import MaskedTokensAndNextSentence, NextTokens, Objective
from evenpack.data.prepared import PreparedData
from evenpack.engine.run_config import RunConfig
from evenpack.engine.step_items import average_item
from evenpack.models.losses import LossDenominators, exact_denominators, expected_denominators
from evenpack.models.model_config import BertConfig

Denominators = Callable[[StepCounts], LossDenominators]
"""From what a step holds over all ranks to what its gradients' losses are divided by."""


def build_objective(config: RunConfig, prepared: PreparedData) -> Objective:
    """Next tokens for GPT-2; masked tokens and next sentences for BERT.

    Raises: DataError if the vocabulary has none of the special tokens that masks need.
    """
    if not isinstance(config.model, BertConfig):
        return NextTokens()
    return MaskedTokensAndNextSentence(
        masking=config.masking,
        vocabulary=prepared.masking_vocabulary,
        seed=config.run.seed,
        reduction=config.model.mlm_reduction,
    )


def build_denominators(config: RunConfig, prepared: PreparedData) -> Denominators:
    """What `model.loss_balancing` says; a loss that is reported is divided by the exact ones all the same."""
    if not isinstance(config.model, BertConfig) or config.model.loss_balancing == "exact":
        return partial(exact_denominators, config.model)
    item = average_item(config, prepared)
    expected = expected_denominators(
        config.model,
        packs=config.training.items_per_step,
        max_targets_per_pack=_masked_tokens_of_a_full_row(config, item.row_slots),
        token_efficiency=item.fill,
        packing_factor=item.sequences,
    )
    return lambda step_counts: expected


def _masked_tokens_of_a_full_row(config: RunConfig, slots: int) -> int:
    """Of sequences of full length, the last one of what is left."""
    longest = config.data.recipe.max_sequence_length
    whole, rest = divmod(slots, longest)
    return int(masked_count(np.array([longest] * whole + [rest] * (rest > 0)), config.masking).sum())
