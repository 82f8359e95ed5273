"""Defines runs of a chunking study that consist of numbers alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenpack.studies.chunking.compare import Arm, Finished
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import Curve, HeldOut


def study(**chunking: Any) -> ChunkingConfig:
    """A study whose runs are not on disk."""
    phase = {"base": "run.yaml", "seeds": [1, 2, 3], "arms": {"some": {}}}
    values = {"study": {"name": "small", "output_dir": "out"}, "phases": {"training": phase}, "chunking": chunking}
    return ChunkingConfig.model_validate(values)


def arm(name: str, *, recipe: str = "concat", length: int = 64, atom: int | None = None) -> Arm:
    return Arm(
        name=name,
        recipe=recipe,
        kind="concat",
        max_sequence_length=length,
        atom=atom,
        rows_per_step=8,
        epochs=2.0,
        isolates=True,
        counts_padding=recipe == "padding",
    )


def curve(perplexity: Sequence[float], *, own: float | None = None) -> Curve:
    """Returns a curve with these perplexities, step by step."""
    return Curve(
        losses=np.log(np.asarray(perplexity, dtype=np.float64)),
        tokens_per_step=384.0,
        slots_per_step=512.0,
        own_loss=None if own is None else float(np.log(own)),
    )


def finished(perplexity: Sequence[float], *, documents: float | None = None) -> Finished:
    held_out = HeldOut(own_rows=None, documents=documents)
    return Finished(curve=curve(perplexity), held_out=held_out)
