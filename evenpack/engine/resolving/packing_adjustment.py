"""Adjusts values chosen for steps of single sequences to steps of packs (PackedBERT, section 3.3).

A pack holds p sequences on average, the packing factor, so a step of as many packs as there were sequences is a batch
p times as large. `training.packing_adjustment` chooses the correction:

    fewer_accumulations   packs_per_step / p, and so as much less accumulation; the batch and everything else stays
    lamb_betas            beta1**p and beta2**p; steps / p and warmup_steps / p, since a step takes p times the data

The learning rate is never scaled: the paper found that slower. Nothing here depends on ranks or micro-batches, so that
every split of the run, and every process that resumes it, computes the same values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evenpack.config import validate
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.step_items import training_packing
from evenpack.errors import ConfigError

_NEAR = 0.05
"""A batch within this fraction is near enough, if ranks and micro-batches divide it better."""

_FAR = 0.25
"""A batch that differs by more is no longer the same batch."""


@dataclass(frozen=True, kw_only=True)
class PackingAdjustment:
    """The adjusted values of a run file."""

    config: RunConfig
    """The adjusted run."""
    packing_factor: float
    """Sequences per pack, on average over the draws of the run."""
    description: tuple[str, ...]
    """Description for people: the changes, with old and new values and the effect of rounding. Empty without
    adjustment."""


def adjust_to_packing(config: RunConfig, *, packing_factor: float) -> PackingAdjustment:
    """Applies `training.packing_adjustment` to a run file's values. It must not be applied twice.

    Args:
        packing_factor: p; see `measured_packing_factor`.

    Raises: ConfigError if no number of packs is near packs_per_step / p, or if the run is invalid with the new values;
    ValueError for a factor below 1.
    """
    if not 1.0 <= packing_factor < math.inf:
        raise ValueError(f"a packing factor is at least 1, got {packing_factor}")
    kind = config.training.packing_adjustment
    changes: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    if kind == "fewer_accumulations":
        changes, lines = _fewer_accumulations(config, packing_factor)
    elif kind == "lamb_betas":
        changes, lines = _lamb_betas(config, packing_factor)
    if lines:
        rate = f"optimizer.learning_rate {config.optimizer.learning_rate:g} stays"
        lines = [f"packing adjustment {kind} for {packing_factor:.4g} sequences per pack", *lines, rate]
    return PackingAdjustment(
        config=_changed(config, changes, lines), packing_factor=packing_factor, description=tuple(lines)
    )


def measured_packing_factor(prepared: PreparedData) -> float:
    """Returns sequences per pack, on average over an epoch of each source, the sources weighted as the run draws them.

    Raises: DataError if a source has nothing to train on.
    """
    total = sum(prepared.weights)
    sources = zip(prepared.source_names, prepared.weights, strict=True)
    return sum(weight / total * training_packing(prepared, name).packing_factor for name, weight in sources)


def _fewer_accumulations(config: RunConfig, factor: float) -> tuple[dict[str, dict[str, Any]], list[str]]:
    before = config.training.items_per_step
    packs = _packs_for(before, factor)
    sequences = packs * factor
    line = (
        f"training.packs_per_step {before} -> {packs} (exactly {before / factor:.2f}): {sequences:.1f} sequences per "
        f"step on average, {_difference(sequences / before)}"
    )
    return {"training": {"packs_per_step": packs}}, [line]


def _packs_for(sequences: int, factor: float) -> int:
    """Returns a number of packs that hold about as many sequences, and divide well among ranks and micro-batches.

    It is a multiple of the largest divisor of `sequences` for which it is near enough.
    """
    aim = sequences / factor
    for tolerance in (_NEAR, _FAR):
        for divisor in _divisors_from_largest(sequences):
            packs = divisor * max(1, _rounded(aim / divisor))
            if abs(packs / aim - 1.0) <= tolerance:
                return packs
    raise ConfigError(
        f"training.packing_adjustment fewer_accumulations would cut training.packs_per_step ({sequences}) to "
        f"{aim:.2f} for {factor:.4g} sequences per pack, and no whole number is within {100 * _FAR:.0f} % of that: "
        "choose a larger packs_per_step, or lamb_betas, which keeps it"
    )


def _lamb_betas(config: RunConfig, factor: float) -> tuple[dict[str, dict[str, Any]], list[str]]:
    optimizer, training, schedule = config.optimizer, config.training, config.schedule
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"beta1": optimizer.beta1**factor, "beta2": optimizer.beta2**factor},
        "schedule": {"warmup_steps": _rounded(schedule.warmup_steps / factor)},
    }
    betas, warmup = changes["optimizer"], changes["schedule"]["warmup_steps"]
    lines = []
    if training.steps is not None:  # epochs and samples already count sequences
        steps = max(1, _rounded(training.steps / factor))
        changes["training"] = {"steps": steps}
        lines.append(
            f"training.steps {training.steps} -> {steps} (exactly {training.steps / factor:.2f}); total sequences: "
            f"{_difference(steps * factor / training.steps)}"
        )
    return changes, [
        f"optimizer.beta1 {optimizer.beta1:g} -> {betas['beta1']:.6g}, beta2 {optimizer.beta2:g} -> "
        f"{betas['beta2']:.6g}",
        *lines,
        f"schedule.warmup_steps {schedule.warmup_steps} -> {warmup} (exactly {schedule.warmup_steps / factor:.2f})",
        f"training.packs_per_step {training.items_per_step} stays: "
        f"{training.items_per_step * factor:.1f} sequences per step on average",
    ]


def _changed(config: RunConfig, changes: dict[str, dict[str, Any]], lines: list[str]) -> RunConfig:
    if not changes:
        return config
    values = config.model_dump()
    for section, section_changes in changes.items():
        values[section] |= section_changes
    return validate(values, RunConfig, origin="\n  ".join([*lines, "with these numbers"]))


def _difference(ratio: float) -> str:
    """Returns a number of sequences compared with the one for which the run file was written."""
    if abs(ratio - 1.0) < 0.0005:
        return "as many as without packing"
    return f"{100 * abs(ratio - 1.0):.1f} % {'more' if ratio > 1.0 else 'fewer'} than without packing"


def _rounded(number: float) -> int:
    """Rounds to the nearest whole number, halves up (Python's `round` would take them to the even one)."""
    return math.floor(number + 0.5)


def _divisors_from_largest(number: int) -> Iterator[int]:
    return (number // other for other in range(1, number + 1) if number % other == 0)
