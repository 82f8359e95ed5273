"""The message of a rank whose GPU has run out of memory: the estimate of the run's memory, and what would fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evenpack.engine.memory.estimate import run_memory
from evenpack.engine.memory.text import memory_text
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.models.common.device_peaks import known_device


@contextmanager
def explained_memory(run: ResolvedRun, world: World) -> Iterator[None]:
    """Explains a lack of memory within the block. Raises: RunError with the table of `evenpack train --dry-run`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = run_memory(
            run.config,
            run.item,
            vocabulary_size=run.prepared.vocabulary_size,
            ranks=world.size,
            device=known_device(world.device_name),
        )
        first_line = str(error).partition("\n")[0]
        raise RunError(
            f"{world.device_name} has too little memory for this step: {first_line}\n"
            f"{memory_text(found, batching=run.config.training.batching)}\n"
            f"Take a smaller training.{run.config.training.batching}_per_micro_batch, or "
            "model.activation_checkpointing=true; checkpoints stay valid with either"
        ) from error
