"""The section of packing, `data.packing:` of a run file."""

from pydantic import Field

from evenpack.config import Section
from evenpack.data.limits import MOST_SLOTS
from evenpack.units import Sequences


class PackingConfig(Section):
    """The packing algorithm and its options."""

    algorithm: str = "auto"
    """`auto` or the name of an algorithm of docs/packing.md: `longest_pack_first`, `cutting_stock`, `least_squares`,
    ..."""
    max_sequences_per_pack: Sequences | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Most sequences of a pack; null: no limit."""
    options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the algorithm, such as {weight: 0.09} of `least_squares`; docs/packing.md lists them."""
