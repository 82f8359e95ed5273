"""`StepCounts`, by which every rank divides its losses; apart from batches, because planning a step needs no torch."""

from dataclasses import dataclass, fields
from typing import Literal

Divisor = Literal["targets", "sequences", "packs"]
"""A count of a step by which a loss is divided, by its name in `StepCounts`."""


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of one whole step over all ranks; every rank computes them from the plan, without communication."""

    packs: int
    sequences: int
    tokens: int
    """Real tokens, without padding."""
    targets: int
    """Tokens to be predicted: next tokens, or masked ones."""

    def __add__(self, other: "StepCounts") -> "StepCounts":
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return StepCounts(**sums)

    def of(self, divisor: Divisor) -> int:
        """Returns the count of this name."""
        count: int = getattr(self, divisor)
        return count
