"""Defines the `attention:` section of a run file."""

from typing import Literal

from evenpack.config import Section


class AttentionConfig(Section):
    """The kernel that computes attention over packs, and whether sequences of a pack attend to each other."""

    backend: Literal["auto", "reference", "sdpa", "varlen", "flash", "flash4", "flex"] = "auto"
    """Kernel that computes attention. `auto` chooses the fastest available one and logs the choice; a named one that is
    not available is an error. `flash4`, FlashAttention 4, is taken by name only."""
    on_slow_backend: Literal["warn", "error"] = "warn"
    """What a run on GPUs does if only `sdpa` is left for `auto`, which makes the host wait for the device in every
    layer: it logs a warning with the remedies, or refuses to start. CPUs have no faster kernel."""
    isolate: bool = True
    """Whether the sequences of a pack are isolated, so that none attends to another. For study: false makes all
    sequences of a pack one segment, with its padding as another; packed layout only."""
