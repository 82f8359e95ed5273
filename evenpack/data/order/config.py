"""The sections of packing and of the mixture's schedule, `data.packing:` and `data.mixture_schedule:` of a run file."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import Field, model_validator

from evenpack.config import Section, nearest
from evenpack.data.limits import MOST_SLOTS, MOST_STEPS
from evenpack.data.order.weight_change import WeightChange
from evenpack.units import Sequences, StepNumber

HIGHEST_WEIGHT = 1_000_000


class PackingConfig(Section):
    """The packing algorithm and its options."""

    algorithm: str = "auto"
    """`auto` or the name of an algorithm of docs/packing.md: `longest_pack_first`, `cutting_stock`, `least_squares`,
    ..."""
    max_sequences_per_pack: Sequences | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Most sequences of a pack; null: no limit."""
    options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the algorithm, such as {weight: 0.09} of `least_squares`; docs/packing.md lists them."""


class MixtureChange(Section):
    """A change of the sources' weights at a step."""

    step: StepNumber = Field(ge=2, le=MOST_STEPS)
    """The first step with the new weights; steps count from 1, as in metrics.jsonl."""
    weights: dict[str, int] = Field(min_length=1)
    """New weights of sources by name; a source that is not named keeps its weight."""

    @model_validator(mode="before")
    @classmethod
    def _check_weights(cls, values: Any) -> Any:
        """Checks the weights; here, because the message has to name the entry."""
        weights = values.get("weights") if isinstance(values, dict) else None
        for name, weight in weights.items() if isinstance(weights, dict) else ():
            if type(weight) is not int or not 1 <= weight <= HIGHEST_WEIGHT:
                raise ValueError(
                    f"entry of step {values.get('step')}: the weight of '{name}' is {weight!r}: give a whole number "
                    f"from 1 to {HIGHEST_WEIGHT:,}; a source that is no longer wanted can get 1 beside large ones"
                )
        return values


def check_schedule(schedule: Sequence[MixtureChange], sources: Sequence[str]) -> None:
    """Checks a schedule.

    Raises: ValueError for an entry with an unknown source, or whose step is not after the previous one.
    """
    for entry in schedule:
        unknown = next((name for name in entry.weights if name not in sources), None)
        if unknown is not None:
            raise ValueError(
                f"mixture_schedule, entry of step {entry.step}: there is no source '{unknown}'; "
                f"{nearest(unknown, list(sources))}"
            )
    for before, after in pairwise(schedule):
        if before.step >= after.step:
            raise ValueError(
                f"mixture_schedule: the entry of step {after.step} comes after the entry of step {before.step}: give "
                "one entry per step, in the order of steps"
            )


def weight_changes(schedule: Sequence[MixtureChange], weights: Mapping[str, int]) -> tuple[WeightChange, ...]:
    """Returns the schedule with the weights of all sources in each entry; `weights` apply to the first step."""
    current = dict(weights)
    changes = []
    for entry in schedule:
        current |= entry.weights
        changes.append(WeightChange(step=entry.step - 1, weights=tuple(current.values())))
    return tuple(changes)
