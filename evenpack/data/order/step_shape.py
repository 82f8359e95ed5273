"""How a step is formed: what it counts, its layout, and its assignment to ranks.

A run file is checked against these names, so nothing heavy is imported here.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from evenpack.errors import ConfigError

Batching = Literal["packs", "sequences"]
"""The items that a step counts and that are assigned whole: packs of the plan, or single sequences."""

Layout = Literal["packed", "unpadded", "padded"]

AssignmentPolicy = Literal["arrival", "sorted", "sorted_serpentine", "cost_balanced", "max_tokens"]

UNPADDED_SLOT_MULTIPLE = 64
"""Multiple to which un-padded micro-batches are padded, so that matrix shapes suit tensor cores."""

POLICIES: dict[tuple[Batching, Layout], tuple[AssignmentPolicy, ...]] = {
    ("packs", "packed"): ("arrival", "cost_balanced"),
    ("packs", "unpadded"): ("arrival", "cost_balanced"),
    ("packs", "padded"): ("arrival", "cost_balanced"),
    ("sequences", "unpadded"): ("arrival", "sorted_serpentine", "cost_balanced", "max_tokens"),
    ("sequences", "padded"): ("arrival", "sorted", "max_tokens"),
}
"""The valid combinations. Single sequences in the packed layout would be packs of one: that is `padded`."""


@dataclass(frozen=True, kw_only=True)
class CostWeights:
    """Weights of an item's cost to a rank, all in the same unit.

    per_token · tokens + per_squared_length · Σ length² + per_segment · segments, over the segments of its sequences,
    and for each window of the model's layers per_pair_within · the pairs of tokens that are at most so far apart.

    Raises: ConfigError for a weight that is no number, negative or not finite.
    """

    per_token: float
    per_squared_length: float
    per_segment: float
    per_pair_within: Mapping[int, float] = field(default_factory=dict, hash=False)
    """By window, for a model with local attention; layers that see whole sequences are in `per_squared_length`."""

    def __post_init__(self) -> None:
        for name, weight in self._by_name.items():
            if not (isinstance(weight, Real) and 0 <= float(weight) < math.inf):
                raise ConfigError(f"a cost weight must be a finite number, 0 or more, found {name} {weight!r}")

    @property
    def _by_name(self) -> dict[str, Any]:
        of_windows = {f"per_pair_within {window}": weight for window, weight in self.per_pair_within.items()}
        names = ("per_token", "per_squared_length", "per_segment")
        return {name: getattr(self, name) for name in names} | of_windows

    @property
    def are_zero(self) -> bool:
        """Whether all items cost the same: nothing."""
        return not any(self._by_name.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {weight:g}" for name, weight in self._by_name.items())

    def to_json(self) -> dict[str, Any]:
        """Returns the weights as JSON values; those of windows only if there are any."""
        values = asdict(self)
        windows = values.pop("per_pair_within")
        by_name = {str(window): weight for window, weight in windows.items()}
        return values | {"per_pair_within": by_name} if windows else values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CostWeights":
        """Returns the weights of `to_json`. Raises: KeyError, TypeError, ValueError or ConfigError for others."""
        numbers = {name: float(weight) for name, weight in values.items() if name != "per_pair_within"}
        windows = values.get("per_pair_within", {})
        return cls(**numbers, per_pair_within={int(window): float(weight) for window, weight in windows.items()})

    def in_layout(self, layout: Layout) -> "CostWeights":
        """Returns the terms that distinguish items of this layout.

        In the packed layout every pack has the same slots and so the same work outside attention, whether they hold
        tokens or padding: with a cost per token a pack with more padding would seem less expensive.
        """
        return replace(self, per_token=0.0) if layout == "packed" else self


def micro_batches(batching: Batching, items_per_step: int, items_per_micro_batch: int, *, ranks: int) -> int:
    """Returns the micro-batches of each rank in each step (gradient accumulation).

    Raises: ConfigError with valid values, if the items of a step cannot be divided evenly.
    """
    number, rest = divmod(items_per_step, ranks * items_per_micro_batch)
    if rest == 0:
        return number
    sizes = "no number of ranks is valid"
    if items_per_step % items_per_micro_batch == 0:
        sizes = f"the number of ranks can be {_listed(divisors(items_per_step // items_per_micro_batch))}"
    remedy = (
        f"no {batching}_per_micro_batch helps {ranks} ranks: only a new run or a later stage may have another "
        f"{batching}_per_step"
    )
    choices = micro_batch_choices(items_per_step, ranks=ranks)
    if choices:
        remedy = f"{ranks} ranks can do {batching}_per_micro_batch {_listed(choices)}"
    raise ConfigError(
        f"{ranks} ranks x training.{batching}_per_micro_batch ({items_per_micro_batch}) must divide "
        f"training.{batching}_per_step ({items_per_step}), so that every rank gets the same number of {batching}. With "
        f"this {batching}_per_micro_batch {sizes}; {remedy}"
    )


def micro_batch_choices(items_per_step: int, *, ranks: int) -> list[int]:
    """Returns the items of a micro-batch with which so many ranks can divide a step; none may do."""
    return [] if items_per_step % ranks else divisors(items_per_step // ranks)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How every step of a run or a Loader is formed, whatever the number of ranks."""

    batching: Batching
    items_per_step: int
    """Packs or sequences of one optimizer update over all ranks."""
    items_per_micro_batch: int
    """Items that a rank computes at once; an average, where the policy is `max_tokens`."""
    layout: Layout
    isolate: bool
    """False, for study and in the packed layout alone: all sequences of a pack are one segment."""
    reset_positions: bool
    """False, for study and in the packed layout alone: positions count through the pack."""
    policy: AssignmentPolicy
    cost_weights: CostWeights
    """Weights by which `cost_balanced` balances; the other policies read lengths."""
    windows: tuple[int, ...]
    """Windows of the model's layers, whose pairs each batch counts; empty if all layers see whole sequences."""
    balances_each_micro_batch: bool
    """Whether ranks synchronise in each micro-batch and not only in each step; depends on the sharding."""

    def micro_batches(self, ranks: int) -> int:
        """Returns the micro-batches of each rank in each step; see `micro_batches`."""
        return micro_batches(self.batching, self.items_per_step, self.items_per_micro_batch, ranks=ranks)


def default_policy(batching: Batching, layout: Layout) -> AssignmentPolicy:
    """Returns the policy for a run file that names none.

    Cost does not distinguish single sequences in a rectangle of fixed width: all cost nearly the same.
    """
    return "arrival" if (batching, layout) == ("sequences", "padded") else "cost_balanced"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, 1 and itself included, from the least to the largest."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
