"""The sources of a run in the form that its mixture takes, without the code that makes batches (and torch)."""

import xxhash

from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_shape import Batching
from evenpack.data.prepared import PreparedData, Split


def packed_sources(
    prepared: PreparedData, split: Split, *, seed: int, only: str | None = None, batching: Batching = "packs"
) -> tuple[PackedSource, ...]:
    """Returns views and plans of one split, in the mixture's order."""
    names = prepared.source_names if only is None else (only,)
    return tuple(
        PackedSource(
            view=prepared.view(name, split),
            plan=prepared.plan(name, split, seed=seed, batching=batching),
            key=xxhash.xxh3_64_intdigest(name.encode()),
        )
        for name in names
    )
