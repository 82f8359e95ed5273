"""`StepCounts`, by which every rank divides its losses; apart from batches, because planning a step needs no torch."""

from dataclasses import dataclass, fields


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
