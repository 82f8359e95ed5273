"""How a step is formed: what it counts, how it is laid out, who computes what of it.

A run file is checked against these names, so nothing heavy is imported here.
"""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["packed", "unpadded", "padded"]

UNPADDED_SLOT_MULTIPLE = 64
"""Un-padded micro-batches are filled up to a multiple of this, so that matrix shapes stay friendly to tensor cores."""


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """How sequences lie in every batch of a run."""

    layout: Layout
    isolate: bool = True
    """False, for study and in the packed layout alone: all sequences of a pack are one segment."""
    reset_positions: bool = True
    """False, for study and in the packed layout alone: positions count through the pack."""


Batching = Literal["packs", "sequences"]
"""What a step counts, and what is assigned whole: packs of the plan, or single sequences."""

AssignmentPolicy = Literal["arrival", "sorted", "sorted_serpentine", "cost_balanced", "max_tokens"]

POLICIES: dict[tuple[Batching, Layout], tuple[AssignmentPolicy, ...]] = {
    ("packs", "packed"): ("arrival", "cost_balanced"),
    ("packs", "unpadded"): ("arrival", "cost_balanced"),
    ("packs", "padded"): ("arrival", "cost_balanced"),
    ("sequences", "unpadded"): ("arrival", "sorted_serpentine", "cost_balanced", "max_tokens"),
    ("sequences", "padded"): ("arrival", "sorted", "max_tokens"),
}
"""What can be had together. Single sequences in the packed layout would be packs of one: that is `padded`."""


def default_policy(batching: Batching, layout: Layout) -> AssignmentPolicy:
    """What assigns a step where the run file names no policy.

    Cost tells nothing about single sequences in a rectangle as wide as the longest can be: all cost nearly the same.
    """
    return "arrival" if (batching, layout) == ("sequences", "padded") else "cost_balanced"
