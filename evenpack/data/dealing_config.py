"""The names of what forms a step and who computes what of it; `dealing.py` and `balance.py` do it.

A run file is checked against them, so nothing heavy is imported here.
"""

from typing import Literal

from evenpack.data.batch_form import Layout

Batching = Literal["packs", "sequences"]
"""What a step counts, and what is dealt whole: packs of the plan, or single sequences."""

DealingPolicy = Literal["arrival", "sorted", "sorted_serpentine", "cost_balanced", "max_tokens"]

POLICIES: dict[tuple[Batching, Layout], tuple[DealingPolicy, ...]] = {
    ("packs", "packed"): ("arrival", "cost_balanced"),
    ("packs", "unpadded"): ("arrival", "cost_balanced"),
    ("packs", "padded"): ("arrival", "cost_balanced"),
    ("sequences", "unpadded"): ("arrival", "sorted_serpentine", "cost_balanced", "max_tokens"),
    ("sequences", "padded"): ("arrival", "sorted", "max_tokens"),
}
"""What can be had together. Single sequences in the packed layout would be packs of one: that is `padded`."""


def default_policy(batching: Batching, layout: Layout) -> DealingPolicy:
    """What deals a step where the run file names no policy.

    Cost tells nothing about single sequences in a rectangle as wide as the longest can be: all cost nearly the same.
    """
    return "arrival" if (batching, layout) == ("sequences", "padded") else "cost_balanced"
