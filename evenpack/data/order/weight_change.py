"""One change of a mixture's weights. A run file is checked by it, so nothing heavy is imported here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightChange:
    """New weights of all sources from a given step."""

    step: int
    """The first step drawn by these weights."""
    weights: tuple[int, ...]
    """Weights of all sources, in the mixture's order."""
