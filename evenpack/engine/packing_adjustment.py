"""Numbers chosen for steps of single sequences, made to suit steps of packs (PackedBERT, section 3.3).

A pack holds p sequences on average, the packing factor, so a step of as many packs as there were sequences is a batch
p times as large. `training.packing_adjustment` says what follows:

    fewer_accumulations   packs_per_step / p, and so as much less accumulation; the batch stays, all else with it
    lamb_betas            beta1**p and beta2**p; steps / p and warmup_steps / p, since a step takes p times the data

The learning rate is never scaled: the paper found that slower. Nothing here depends on ranks or micro-batches, so
that every split of the run, and every process that goes on with it, comes to the same numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evenpack.config import validate
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.step_items import training_packing
from evenpack.errors import ConfigError

_NEAR = 0.05
"""A batch that is off by this share is near enough, if ranks and micro-batches divide it the better for it."""

_FAR = 0.25
"""A batch that is off by more is no longer the same batch."""


@dataclass(frozen=True, kw_only=True)
class PackingAdjustment:
    """What became of a run file's numbers."""

    config: RunConfig
    """The run as it will be."""
    packing_factor: float
    """Sequences a pack, on average over what the run draws."""
    description: tuple[str, ...]
    """For people: what changed, from what to what, and what rounding did. Empty if nothing was asked for."""


def adjust_to_packing(config: RunConfig, *, packing_factor: float) -> PackingAdjustment:
    """Applies `training.packing_adjustment` to a run as its file has it. Not to be applied twice.

    Args:
        packing_factor: p; see `measured_packing_factor`.

    Raises: ConfigError if no number of packs is near packs_per_step / p, or if the run is not sound with the new
    numbers; ValueError for a factor below 1.
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
        lines = [f"packing adjustment {kind} for {packing_factor:.4g} sequences a pack", *lines, rate]
    return PackingAdjustment(
        config=_changed(config, changes, lines), packing_factor=packing_factor, description=tuple(lines)
    )


def measured_packing_factor(prepared: PreparedData) -> float:
    """Sequences a pack, on average over an epoch of each source, the sources weighted as the run draws them.

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
        f"training.packs_per_step {before} -> {packs} (exactly {before / factor:.2f}): {sequences:.1f} sequences a "
        f"step on average, {_difference(sequences / before)}"
    )
    return {"training": {"packs_per_step": packs}}, [line]


def _packs_for(sequences: int, factor: float) -> int:
    """A number of packs that hold about as many sequences, and divide as well among ranks and micro-batches.

    It is a multiple of the largest divisor of `sequences` with which it comes near.
    """
    aim = sequences / factor
    for tolerance in (_NEAR, _FAR):
        for divisor in _divisors_from_largest(sequences):
            packs = divisor * max(1, _rounded(aim / divisor))
            if abs(packs / aim - 1.0) <= tolerance:
                return packs
    raise ConfigError(
        f"training.packing_adjustment fewer_accumulations would cut training.packs_per_step ({sequences}) to "
        f"{aim:.2f} for {factor:.4g} sequences a pack, and no whole number is within {100 * _FAR:.0f} % of that: "
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
    if training.steps is not None:  # epochs and samples are counted in sequences already
        steps = max(1, _rounded(training.steps / factor))
        changes["training"] = {"steps": steps}
        lines.append(
            f"training.steps {training.steps} -> {steps} (exactly {training.steps / factor:.2f}); sequences in all: "
            f"{_difference(steps * factor / training.steps)}"
        )
    return changes, [
        f"optimizer.beta1 {optimizer.beta1:g} -> {betas['beta1']:.6g}, beta2 {optimizer.beta2:g} -> "
        f"{betas['beta2']:.6g}",
        *lines,
        f"schedule.warmup_steps {schedule.warmup_steps} -> {warmup} (exactly {schedule.warmup_steps / factor:.2f})",
        f"training.packs_per_step {training.items_per_step} stays: "
        f"{training.items_per_step * factor:.1f} sequences a step on average",
    ]


def _changed(config: RunConfig, changes: dict[str, dict[str, Any]], lines: list[str]) -> RunConfig:
    if not changes:
        return config
    values = config.model_dump()
    for section, section_changes in changes.items():
        values[section] |= section_changes
    return validate(values, RunConfig, origin="\n  ".join([*lines, "with these numbers"]))


def _difference(ratio: float) -> str:
    """A number of sequences against the one that the run file was written for."""
    if abs(ratio - 1.0) < 0.0005:
        return "as many as without packing"
    return f"{100 * abs(ratio - 1.0):.1f} % {'more' if ratio > 1.0 else 'fewer'} than without packing"


def _rounded(number: float) -> int:
    """To the nearest whole number, halves up (Python's `round` would take them to the even one)."""
    return math.floor(number + 0.5)


def _divisors_from_largest(number: int) -> Iterator[int]:
    return (number // other for other in range(1, number + 1) if number % other == 0)
