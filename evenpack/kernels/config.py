"""The `attention:` section of a run file."""

from typing import Literal

from evenpack.config import Section


class AttentionConfig(Section):
    """Which kernel computes attention over packs, and who attends to whom."""

    backend: Literal["auto", "reference", "sdpa", "varlen", "flash", "flex"] = "auto"
    """Kernel that computes attention. `auto` takes the fastest that can serve and says which; a named one that cannot
    serve is an error."""
    on_slow_backend: Literal["warn", "error"] = "warn"
    """What a run on GPUs does where `auto` is left with `sdpa`, which makes the host wait for the device in every
    layer: it says so, with the remedies, or refuses to start. CPUs have no faster one."""
    isolate: bool = True
    """Whether sequences of a pack are kept apart. For study: false makes all sequences of a pack one segment, its
    padding still another; packed layout only."""
