"""What a run asks of its model, and what it divides the losses by."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evenpack.batch import StepCounts
from evenpack.data.masking import masked_count
from evenpack.data.objectives import (
    MaskedTokensAndNextSentence,
    NextTokens,
    Objective,
    StoredMasksAndNextSentence,
)
from evenpack.data.prepared import PreparedData
from evenpack.data.recipes import MaskedPairsView
from evenpack.engine.packing_adjustment import measured_packing_factor, training_packing
from evenpack.engine.run_config import RunConfig
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
    if config.static_masks is not None:
        return StoredMasksAndNextSentence(
            vocabulary_size=prepared.vocabulary_size, reduction=config.model.mlm_reduction
        )
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
    expected = expected_denominators(
        config.model,
        packs=config.training.packs_per_step,
        targets_of_a_full_pack=_masked_tokens_of_a_full_pack(config, prepared),
        token_efficiency=_token_efficiency(prepared),
        packing_factor=measured_packing_factor(prepared),
    )
    return lambda step_counts: expected


def _masked_tokens_of_a_full_pack(config: RunConfig, prepared: PreparedData) -> float:
    """Of sequences of full length, the last one of what is left; stored masks: as many for a token as they have."""
    if config.static_masks is not None:
        return _weighted_mean(prepared, partial(_stored_masks_of_a_pack, prepared)) / _token_efficiency(prepared)
    longest = config.data.recipe.max_sequence_length
    whole, rest = divmod(config.data.pack_length, longest)
    return float(masked_count(np.array([longest] * whole + [rest] * (rest > 0)), config.masking).sum())


def _token_efficiency(prepared: PreparedData) -> float:
    """Share of the slots that hold a token, the sources weighted as the run draws them."""
    return _weighted_mean(prepared, lambda source: training_packing(prepared, source).efficiency)


def _stored_masks_of_a_pack(prepared: PreparedData, source: str) -> float:
    """On average over an epoch."""
    view = prepared.view(source, "train")
    assert isinstance(view, MaskedPairsView), "prepared with the settings of this run"
    return len(view.mask_positions) / training_packing(prepared, source).packs


def _weighted_mean(prepared: PreparedData, of_source: Callable[[str], float]) -> float:
    total = sum(prepared.weights)
    sources = zip(prepared.source_names, prepared.weights, strict=True)
    return sum(weight / total * of_source(name) for name, weight in sources)
