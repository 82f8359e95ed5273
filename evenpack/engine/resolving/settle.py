"""Values of a run file that depend on its data and model: the packs of a step, and the steps of the run.

A run file may give a step in tokens, and the length in epochs, samples, tokens or tokens per parameter. Here they are
converted to packs (or sequences) and steps, once, with a line for people on each result. Nothing here opens prepared
data, so that a budget can be computed before there is any.
"""

from fractions import Fraction

from evenpack.config import validate
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.deepspeed_config import micro_batches_per_step
from evenpack.engine.resolving.packing_adjustment import adjust_to_packing
from evenpack.engine.resolving.run_length import LENGTHS, StepContents, steps_of
from evenpack.engine.resolving.step_items import AverageItem
from evenpack.errors import ConfigError
from evenpack.models.cost import parameter_count

_NEAR = Fraction(1, 50)
"""A step within this fraction is near enough, if more numbers of ranks divide it."""

_FAR = Fraction(1, 4)
"""A step that differs by more is not the requested one."""


def parameters_of(config: RunConfig, vocabulary_size: int) -> int:
    """Returns the parameters of the run's model; an output matrix that is the token embedding counts once."""
    return parameter_count(config.model, vocabulary_size=vocabulary_size, max_positions=positions_of(config))


def positions_of(config: RunConfig) -> int:
    """Returns the rows that the model's table of positions has, if it has one."""
    return config.model.max_positions or config.positions_needed


def settle(
    config: RunConfig, item: AverageItem, *, items_per_epoch: int | None, vocabulary_size: int, packing_factor: float
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run in packs (or sequences) and steps, adjusted to its packing, and a description of the changes.

    Args:
        items_per_epoch: packs or sequences of all sources together; None, if unknown, is for runs whose length is not
            in epochs.
        packing_factor: sequences per pack, for `training.packing_adjustment`.

    Raises: ConfigError if a value cannot be computed, or if the run is invalid with the new values.
    """
    config, of_step = settle_step(config, item)
    of_packing: tuple[str, ...] = ()
    if config.training.packing_adjustment != "none":
        adjusted = adjust_to_packing(config, packing_factor=packing_factor)
        config, of_packing = adjusted.config, adjusted.description
    # The model is built to be counted, which takes a second, only where its length is in parameters.
    parameters = None if config.training.chinchilla_ratio is None else parameters_of(config, vocabulary_size)
    config, of_length = settle_length(config, item, items_per_epoch=items_per_epoch, parameters=parameters)
    return config, (*of_step, *of_packing, *of_length)


def settle_step(config: RunConfig, item: AverageItem) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with the packs or sequences of its `training.tokens_per_step`, and a description.

    Raises: ConfigError if no number of whole micro-batches holds about as many tokens.
    """
    training = config.training
    asked = training.tokens_per_step
    if asked is None:
        return config, ()
    items = items_for_tokens(training, item)
    held = items * item.tokens
    line = (
        f"training.tokens_per_step {asked:,}: training.{training.batching}_per_step {items} (exactly "
        f"{float(asked / item.tokens):,.2f}), of {float(item.tokens):,.1f} tokens each on average: {float(held):,.0f} "
        f"tokens per step, {_difference(held / asked)}"
    )
    changes = {f"{training.batching}_per_step": items, "tokens_per_step": None}
    return _changed(config, changes, origin=line), (line,)


def items_for_tokens(training: TrainingSection, item: AverageItem) -> int:
    """Returns how many packs or sequences hold about `training.tokens_per_step`, in whole micro-batches.

    Of the numbers within 2 %, it is one that the highest power of two of ranks divides; it does not depend on the
    actual ranks, since a step must not. Raises: ConfigError if none is within a quarter.
    """
    asked, unit = training.tokens_per_step, training.items_per_micro_batch
    assert asked is not None, "the step is given in tokens"
    aim = asked / item.tokens
    for power in reversed(range(max(1, int(aim / unit)).bit_length())):
        items = _nearest_multiple(aim, unit << power)
        if abs(items / aim - 1) <= _NEAR:
            return items
    items = _nearest_multiple(aim, unit)
    if abs(items / aim - 1) > _FAR:
        kind = training.batching
        raise ConfigError(
            f"training.tokens_per_step ({asked:,}) is {float(aim):,.2f} {kind} of {float(item.tokens):,.1f} tokens on "
            f"average, and no multiple of training.{kind}_per_micro_batch ({unit}) is within {100 * _FAR} % of that: "
            f"one micro-batch holds {float(unit * item.tokens):,.0f} tokens; raise tokens_per_step, or lower "
            f"{kind}_per_micro_batch"
        )
    return items


def settled_micro_batches(training: TrainingSection, item: AverageItem, ranks: int, *, asked: int | None) -> int:
    """Returns the micro-batches of each rank in each step, of a run whose step is settled.

    Args:
        asked: the tokens of a step before it was settled; None where the run file gives packs or sequences.

    Raises: ConfigError with valid values, in tokens too if they were requested, if the ranks cannot divide a step.
    """
    try:
        return micro_batches_per_step(training, ranks)
    except ConfigError as error:
        if asked is None:
            raise
        kind, share = training.batching, ranks * training.items_per_micro_batch
        problem = "is below one micro-batch per rank" if training.items_per_step < share else "cannot be divided evenly"
        raise ConfigError(
            f"training.tokens_per_step ({asked:,}) is {training.items_per_step} {kind} and {problem}: {ranks} ranks "
            f"take multiples of {share} {kind}, {float(share * item.tokens):,.0f} tokens on average. {error}"
        ) from error


def settle_length(
    config: RunConfig, item: AverageItem, *, items_per_epoch: int | None, parameters: int | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run with the steps of its length, and a description; its step must be settled.

    Args:
        items_per_epoch: as in `settle`.
        parameters: those of the model; None for runs whose length is not in tokens for each of them.

    Raises: ConfigError if the length is less than a step, or if the run is invalid with these steps.
    """
    training = config.training
    if training.steps is not None:
        return config, ()
    step = StepContents(
        items=training.items_per_step,
        items_per_epoch=items_per_epoch,
        samples=training.items_per_step * item.sequences,
        tokens=training.items_per_step * item.tokens,
        parameters=parameters,
    )
    steps = steps_of(training, step)
    line = (
        f"{_given(training, step)}: training.steps {steps}, of {float(step.samples):,.1f} samples and "
        f"{float(step.tokens):,.1f} tokens each on average, {float(steps * step.samples):,.0f} samples and "
        f"{float(steps * step.tokens):,.0f} tokens in all"
    )
    changes = dict.fromkeys(LENGTHS) | {"steps": steps}
    return _changed(config, changes, origin=line), (line,)


def _given(training: TrainingSection, step: StepContents) -> str:
    """Returns the length in the words of the run file."""
    if training.epochs is not None:
        return f"training.epochs {training.epochs:g} ({step.items_per_epoch:,} {training.batching} each)"
    if training.chinchilla_ratio is not None:
        return f"training.chinchilla_ratio {training.chinchilla_ratio:g} ({step.parameters:,} parameters)"
    if training.tokens is not None:
        return f"training.tokens {training.tokens:,}"
    return f"training.max_samples {training.max_samples}"


def _nearest_multiple(aim: Fraction, unit: int) -> int:
    return unit * max(1, round(aim / unit))


def _changed(config: RunConfig, training: dict[str, int | None], *, origin: str) -> RunConfig:
    values = config.model_dump()
    values["training"] |= training
    return validate(values, RunConfig, origin=origin)


def _difference(ratio: Fraction) -> str:
    share = 100 * abs(float(ratio) - 1.0)
    if share < 0.005:
        return "as many as asked for"
    return f"{share:.2f} % {'more' if ratio > 1 else 'fewer'} than asked for"
