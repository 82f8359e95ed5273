"""The objective of a run, and the denominators of its losses."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evenpack.data.batches.objectives import DynamicMasks, NextTokens, Objective, StoredMasks
from evenpack.data.order.step_shape import Batching, StepShape
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.masking import masked_count
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.data_facts import AverageItem, average_item, items_of_an_epoch
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, StepCounts
from evenpack.models.common.loss_sums import Denominators, exact_denominators, expected_denominators
from evenpack.models.families import family_of

DenominatorsOf = Callable[[StepCounts], Denominators]
"""Maps the counts of a step over all ranks, or of a micro-batch, to the denominators of its gradients' losses."""


def build_objective(config: RunConfig, prepared: PreparedData) -> Objective:
    """Returns the objective of the model's family.

    The section `masking` is ignored if the data stores masks, or needs none.

    Raises: DataError if the vocabulary lacks the special tokens that masks need, or the pieces of whole words.
    """
    if family_of(config.model).objective == "next_tokens":
        return NextTokens()
    declared = {loss.name: loss for loss in config.model.losses}
    losses = {
        "masked_token": declared.get(MASKED_TOKEN.name, MASKED_TOKEN),
        "next_sentence": declared.get(NEXT_SENTENCE.name, NEXT_SENTENCE),
    }
    if prepared.config.has_stored_masks:
        return StoredMasks(vocabulary_size=prepared.vocabulary_size, **losses)
    vocabulary = prepared.tokenizer.masking_vocabulary()
    if config.masking.whole_words:
        vocabulary.require_words()
    return DynamicMasks(
        recipe=prepared.config.recipe,
        masking=config.masking,
        vocabulary=vocabulary,
        seed=config.run.seed,
        **losses,
    )


def build_denominators(config: RunConfig, prepared: PreparedData, shape: StepShape) -> DenominatorsOf:
    """Returns the denominators of the model's section; the reported loss is still divided by the exact ones.

    For `micro_batch`, give the counts of the micro-batch (`TrainingEngine.denominators_of`).
    """
    if config.model.denominators != "expected":
        return partial(exact_denominators, config.model.losses)
    item = average_item(prepared, shape.batching)
    if prepared.config.has_stored_masks:
        targets_of_a_full_pack = _stored_masks_of_an_item(prepared, shape.batching) / item.fill
    else:
        targets_of_a_full_pack = _masked_tokens_of_a_full_row(config, item)
    expected = expected_denominators(
        config.model,
        packs=shape.items_per_step,
        targets_of_a_full_pack=targets_of_a_full_pack,
        token_efficiency=item.fill,
        packing_factor=float(item.sequences),
    )
    return lambda step_counts: expected


def _masked_tokens_of_a_full_row(config: RunConfig, item: AverageItem) -> float:
    """Returns the tokens that are masked of a row which sequences of full length fill."""
    longest = config.data.recipe.max_sequence_length
    whole, rest = divmod(item.row_slots, longest)
    return float(masked_count(np.array([longest] * whole + [rest] * (rest > 0)), config.masking).sum())


def _stored_masks_of_an_item(prepared: PreparedData, batching: Batching) -> float:
    """Returns the average over an epoch, the sources weighted as the run draws them."""
    items = items_of_an_epoch(prepared, batching)
    masks = 0.0
    for name, weight in zip(prepared.source_names, prepared.weights, strict=True):
        masks += weight / sum(prepared.weights) * prepared.stored_masks(name) / items[name]
    return masks
