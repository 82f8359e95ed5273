"""Settles a run file over its prepared data, without torch."""

from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.packing_adjustment import measured_packing_factor
from evenpack.engine.resolving.settle import settle
from evenpack.engine.resolving.step_items import average_item, items_of_an_epoch


def settle_over(config: RunConfig, prepared: PreparedData) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with its step and its length in packs (or sequences) and steps, and a description of the changes.

    Raises: ConfigError if a value cannot be computed; DataError if a source has nothing to train on.
    """
    training = config.training
    is_stated = training.steps is not None and training.tokens_per_step is None
    if is_stated and training.packing_adjustment == "none":
        return config, ()
    return settle(
        config,
        average_item(prepared, training.batching),
        items_per_epoch=sum(items_of_an_epoch(prepared, training.batching).values()),
        vocabulary_size=prepared.vocabulary_size,
        packing_factor=measured_packing_factor(prepared),
    )
