"""One change of a mixture's weights. A run file is checked by it, so nothing heavy is imported here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightChange:
    """Other weights from a step on."""

    step: int
    """The first that is drawn by them, from 2; steps count from 1."""
    weights: tuple[int, ...]
    """Of all sources, in the mixture's order."""
