"""Keys of the section `training:` about checkpoints."""

from pydantic import Field

from evenpack.config import Section
from evenpack.units import Checkpoints, Hours, Steps


class CheckpointSection(Section):
    """When checkpoints are saved, how, and which of them are kept."""

    checkpoint_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one checkpoint to the next. Null: a checkpoint is saved only at the end or when stopped."""
    checkpoint_in_background: bool = True
    """Copy what is saved to host memory and write it while training goes on; the copy is as large as the files that a
    rank writes: 12 bytes per parameter on rank 0 with AdamW at ZeRO 0. False: training waits until the checkpoint is on
    disk. The last checkpoint is always waited for."""
    keep_checkpoints: Checkpoints = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept; older ones are removed, unless one of the next two keys keeps them.
    """
    keep_checkpoint_every_hours: Hours | None = Field(default=None, gt=0.0)
    """Keep the first checkpoint as well, and each one saved at least so many hours after the last one that is kept for
    this reason. Null: none is."""
    keep_best_checkpoint: bool = False
    """Keep the checkpoint of the lowest validation loss as well, of those whose step was evaluated: the mean by
    validation_weights, or else over all held-out targets. `evaluate` and `export` take it by `--checkpoint best`."""
