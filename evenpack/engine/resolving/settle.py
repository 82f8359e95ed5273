"""Settles a run file: what depends on its data and its model becomes packs (or sequences) of a step, and steps.

    training.tokens_per_step                            -> packs or sequences of a step
    training.packing_adjustment                         -> the step, or LAMB's betas, steps and warm-up
    epochs, max_samples, tokens or chinchilla_ratio     -> steps

All of it is computed in one pass, with a line for people on each result, and the run is validated once with the new
values. Nothing here opens prepared data, so that a run can be planned before there is any; and nothing depends on
ranks, so that every split of the run, and every process that resumes it, computes the same values.

A pack holds p sequences on average, the packing factor, so a step of as many packs as there were sequences is a batch
p times as large. `training.packing_adjustment` chooses the correction (PackedBERT, section 3.3):

    fewer_accumulations   packs_per_step / p, and so as much less accumulation; the batch and everything else stays
    lamb_betas            beta1**p and beta2**p; steps / p and warmup_steps / p, since a step takes p times the data

The learning rate is never scaled: the paper found that slower.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from evenpack.config import with_values
from evenpack.data.order.step_shape import divisors
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import LENGTHS, RunConfig, TrainingSection
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.errors import ConfigError
from evenpack.models.cost import parameter_count

_NEAR_TOKENS = Fraction(1, 50)
"""A step within this fraction of the requested tokens is near enough, if more numbers of ranks divide it."""

_NEAR_BATCHES = ((0.01, 8), (0.05, 1))
"""How far a batch may be from the one without packing, so that ranks and micro-batches divide it better, and the least
divisor that it must have for that: 1 % if the GPUs of a node can divide it, else 5 %.
"""

_FAR = Fraction(1, 4)
"""A step that differs by more is not the requested one."""


@dataclass(frozen=True, kw_only=True)
class SettledRun:
    """A run in packs (or sequences) and steps."""

    config: RunConfig
    """The run file with the computed values and without the keys from which they were computed, so that training with
    it gives the same run."""
    adjustment: tuple[str, ...] = ()
    """Lines for people: what was computed, with old and new values and the effect of rounding. Empty if the run file
    states all values itself."""

    def micro_batches(self, ranks: int) -> int:
        """Returns the micro-batches of each rank in each step.

        Raises: ConfigError, if the ranks cannot divide a step, with valid values and how the step was computed.
        """
        try:
            return self.config.training.micro_batches(ranks)
        except ConfigError as error:
            raise ConfigError("\n  ".join([str(error), *self.adjustment])) from error


def settle_prepared(config: RunConfig, prepared: PreparedData) -> SettledRun:
    """Settles a run over its prepared data, which is not read if the run file states all values itself.

    Raises: as `settle`; DataError if a source has nothing to train on.
    """
    training = config.training
    is_stated = training.steps is not None and training.stated_items_per_step is not None
    if is_stated and training.packing_adjustment == "none":
        return SettledRun(config=config)
    return settle(config, DataFacts.of(prepared, training.batching))


def settle(config: RunConfig, facts: DataFacts) -> SettledRun:
    """Returns the run in packs (or sequences) and steps, adjusted to its packing.

    Args:
        facts: facts about the run's data; `items_per_epoch` may be None where the length is not in epochs.

    Raises: ConfigError if a value cannot be computed, or if the run is invalid with the new values.
    """
    values = _Values()
    items = _settle_step(config.training, facts.item, values)
    if config.training.packing_adjustment == "fewer_accumulations":
        items = _take_fewer_accumulations(config, items, facts.item, values)
    elif config.training.packing_adjustment == "lamb_betas":
        _raise_lamb_betas(config, items, facts.item, values)
    if config.training.steps is None:
        _settle_length(config, items, facts, values)
    if not values.lines:
        return SettledRun(config=config)
    origin = values.lines[0] if len(values.lines) == 1 else "\n  ".join([*values.lines, "with these numbers"])
    sections = {"training": values.training, "optimizer": values.optimizer, "schedule": values.schedule}
    settled = with_values(config, sections, origin=origin)
    # Switched off after the check: that a micro-batch divides the step is checked with the ranks, for which a message
    # lists what would divide it.
    training = settled.training.model_copy(update={"packing_adjustment": "none"})
    settled = settled.model_copy(update={"training": training})
    return SettledRun(config=settled, adjustment=tuple(values.lines))


def parameters_of(config: RunConfig, vocabulary_size: int) -> int:
    """Returns the parameters of the run's model; an output matrix that is the token embedding counts once."""
    return parameter_count(config.model, vocabulary_size=vocabulary_size, max_positions=config.max_positions)


@dataclass(kw_only=True)
class _Values:
    """The new values so far, by section, and the lines on them."""

    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def _settle_step(training: TrainingSection, item: AverageItem, values: _Values) -> int:
    """Returns the packs or sequences of a step. Raises: ConfigError, see `items_for_tokens`."""
    asked = training.tokens_per_step
    if asked is None:
        return training.items_per_step
    items = items_for_tokens(training, item)
    held = items * item.tokens
    values.training |= {f"{training.batching}_per_step": items, "tokens_per_step": None}
    values.lines.append(
        f"training.tokens_per_step {asked:,}: training.{training.batching}_per_step {items} (exactly "
        f"{float(asked / item.tokens):,.2f}), of {float(item.tokens):,.1f} tokens each on average: {float(held):,.0f} "
        f"tokens per step, {_compared(held / asked, 'asked for', decimals=2)}"
    )
    return items


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
        if abs(items / aim - 1) <= _NEAR_TOKENS:
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


def _take_fewer_accumulations(config: RunConfig, before: int, item: AverageItem, values: _Values) -> int:
    """Returns the packs of a step that hold as many sequences as the run file has packs. Raises: ConfigError."""
    factor = float(item.sequences)
    packs = _packs_for(before, factor)
    sequences = packs * factor
    values.training["packs_per_step"] = packs
    values.lines += _adjustment_lines(
        config,
        factor,
        f"training.packs_per_step {before} -> {packs} (exactly {before / factor:.2f}): {sequences:.1f} sequences per "
        f"step on average, {_compared(sequences / before, 'without packing', decimals=1)}",
    )
    return packs


def _packs_for(sequences: int, factor: float) -> int:
    """Returns a number of packs that hold about as many sequences, and divide well among ranks and micro-batches.

    It is a multiple of the largest divisor of `sequences` for which it is near enough. Raises: ConfigError if no number
    is within a quarter.
    """
    aim = sequences / factor
    for tolerance, least in (*_NEAR_BATCHES, (float(_FAR), 1)):
        for divisor in reversed([divisor for divisor in divisors(sequences) if divisor >= least]):
            packs = divisor * max(1, _rounded(aim / divisor))
            if abs(packs / aim - 1.0) <= tolerance:
                return packs
    raise ConfigError(
        f"training.packing_adjustment fewer_accumulations would cut training.packs_per_step ({sequences}) to "
        f"{aim:.2f} for {factor:.4g} sequences per pack, and no whole number is within {100 * _FAR} % of that: "
        "choose a larger packs_per_step, or lamb_betas, which keeps it"
    )


def _raise_lamb_betas(config: RunConfig, items: int, item: AverageItem, values: _Values) -> None:
    optimizer, training = config.optimizer, config.training
    factor = float(item.sequences)
    betas = {"beta1": optimizer.beta1**factor, "beta2": optimizer.beta2**factor}
    values.optimizer |= betas
    warmup, decay = config.schedule.warmup_steps, config.schedule.decay_steps
    values.schedule["warmup_steps"] = _rounded(warmup / factor)
    if decay:  # rounded apart they may be more than all steps; and a decay of one step stays one
        together = _rounded((warmup + decay) / factor)
        values.schedule["decay_steps"] = max(1, together - values.schedule["warmup_steps"])
    of_schedule = [
        f"schedule.{key} {before} -> {values.schedule[key]} (exactly {before / factor:.2f})"
        for key, before in {"warmup_steps": warmup, "decay_steps": decay}.items()
        if before is not None and key in values.schedule
    ]
    of_steps = []
    if training.steps is not None:  # epochs and samples already count sequences
        steps = max(1, _rounded(training.steps / factor))
        values.training["steps"] = steps
        of_steps.append(
            f"training.steps {training.steps} -> {steps} (exactly {training.steps / factor:.2f}); total sequences: "
            f"{_compared(steps * factor / training.steps, 'without packing', decimals=1)}"
        )
    values.lines += _adjustment_lines(
        config,
        factor,
        f"optimizer.beta1 {optimizer.beta1:g} -> {betas['beta1']:.6g}, beta2 {optimizer.beta2:g} -> "
        f"{betas['beta2']:.6g}",
        *of_steps,
        *of_schedule,
        f"training.packs_per_step {items} stays: {items * factor:.1f} sequences per step on average",
    )


def _adjustment_lines(config: RunConfig, factor: float, *changes: str) -> Iterator[str]:
    yield f"packing adjustment {config.training.packing_adjustment} for {factor:.4g} sequences per pack"
    yield from changes
    yield f"optimizer.learning_rate {config.optimizer.learning_rate:g} stays"


def _settle_length(config: RunConfig, items: int, facts: DataFacts, values: _Values) -> None:
    """Computes the steps. Raises: ConfigError if the length is less than a step."""
    training = config.training
    # The model is built to be counted, which takes a second, only where its length is in parameters.
    parameters = None if training.chinchilla_ratio is None else parameters_of(config, facts.vocabulary_size)
    samples, tokens = items * facts.item.sequences, items * facts.item.tokens
    steps, given = steps_of(training, facts, items_per_step=items, parameters=parameters)
    values.training |= dict.fromkeys(LENGTHS) | {"steps": steps}
    values.lines.append(
        f"{given}: training.steps {steps}, of {float(samples):,.1f} samples and {float(tokens):,.1f} tokens each on "
        f"average, {float(steps * samples):,.0f} samples and {float(steps * tokens):,.0f} tokens in all"
    )


def steps_of(
    training: TrainingSection, facts: DataFacts, *, items_per_step: int, parameters: int | None
) -> tuple[int, str]:
    """Returns the number of steps of a run whose length is in another unit, and that length for people.

    Args:
        items_per_step: packs or sequences, by `training.batching`.
        parameters: number of the model's parameters; None where the length is not in tokens per parameter.

    Raises: ConfigError if the given length is less than one step.
    """
    samples, tokens = items_per_step * facts.item.sequences, items_per_step * facts.item.tokens
    if training.epochs is not None:
        assert facts.items_per_epoch is not None, "a length in epochs needs data whose epochs are known"
        given = f"training.epochs {training.epochs:g} ({facts.items_per_epoch:,} {training.batching} each)"
        return math.ceil(Fraction(str(training.epochs)) * facts.items_per_epoch / items_per_step), given
    if training.chinchilla_ratio is not None:
        assert parameters is not None, "a length by parameters needs a model that is counted"
        ratio, holds = Fraction(str(training.chinchilla_ratio)), tokens / parameters
        _require_a_step("chinchilla_ratio", ratio, holds=holds, unit="tokens per parameter")
        given = f"training.chinchilla_ratio {training.chinchilla_ratio:g} ({parameters:,} parameters)"
        return math.ceil(ratio / holds), given
    if training.tokens is not None:
        _require_a_step("tokens", training.tokens, holds=tokens, unit="tokens")
        return math.ceil(training.tokens / tokens), f"training.tokens {training.tokens:,}"
    assert training.max_samples is not None, "a run file has one length"
    _require_a_step("max_samples", training.max_samples, holds=samples, unit="samples")
    return math.floor(training.max_samples / samples), f"training.max_samples {training.max_samples}"


def _require_a_step(key: str, asked: int | Fraction, *, holds: Fraction, unit: str) -> None:
    """Checks that the length is at least one step. Raises: ConfigError."""
    if asked < holds:
        shown = f"{asked:,}" if isinstance(asked, int) else f"{float(asked):g}"
        held = f"{float(holds):,.1f}" if holds >= 1 else f"{float(holds):.3g}"
        raise ConfigError(
            f"training.{key} ({shown}) is less than the {held} {unit} of one step: raise it, or lower the size of a "
            "step"
        )


def _compared(ratio: Fraction | float, reference: str, *, decimals: int) -> str:
    """Returns an amount compared with a reference; `ratio` is the amount over the reference."""
    share = 100 * abs(float(ratio) - 1.0)
    if share < 0.5 * 10**-decimals:
        return f"as many as {reference}"
    return f"{share:.{decimals}f} % {'more' if ratio > 1 else 'fewer'} than {reference}"


def _nearest_multiple(aim: Fraction, unit: int) -> int:
    return unit * max(1, round(aim / unit))


def _rounded(number: float) -> int:
    """Rounds to the nearest whole number, halves up (Python's `round` would take them to the even one)."""
    return math.floor(number + 0.5)
