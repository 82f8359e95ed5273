"""How a run lays sequences out; `placement.py` does it."""

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
