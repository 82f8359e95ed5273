"""The estimated memory of a run as text, and what to do if a GPU runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.data.order.step_shape import Batching
from evenpack.engine.memory.estimate import FREE_SHARE, RunMemory
from evenpack.engine.memory.phases import PhaseMemory
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError

_GIGABYTE = 1e9

_PARTS = ("parameters", "gradients", "optimizer", "activations", "head", "buffers", "total")

_FIRST_WIDTH = 11
_WIDTH = 12
"""With the mark of the peak a row has 100 characters."""


def memory_text(found: RunMemory, *, batching: Batching) -> str:
    """Returns the memory of each phase in GB (10^9 bytes) or MB, the peak marked, and what fits."""
    notes = (f"Note: {note}" for note in found.notes)
    return "\n".join([*_table(found, batching), *_advice(found, batching), *notes])


def _table(found: RunMemory, batching: Batching) -> Iterator[str]:
    size = found.size
    peak = found.memory.peak
    unit, name = (_GIGABYTE, "GB") if peak.total >= _GIGABYTE else (1e6, "MB")
    yield (
        f"Memory of one rank of {found.ranks:,}, estimated for a GPU, in {name}: "
        f"{found.items_per_micro_batch:,} {batching}, {size.slots:,} slots, {size.head_rows:,} rows of logits"
    )
    yield "phase".ljust(_FIRST_WIDTH) + "".join(part.rjust(_WIDTH) for part in _PARTS)
    for phase in found.memory.phases:
        yield _row(phase, unit) + (" peak" if phase is peak else "")


def _row(phase: PhaseMemory, unit: float) -> str:
    numbers = (f"{getattr(phase, part) / unit:,.2f}".rjust(_WIDTH) for part in _PARTS)
    return phase.phase.ljust(_FIRST_WIDTH) + "".join(numbers)


def _advice(found: RunMemory, batching: Batching) -> Iterator[str]:
    if found.usable is None or found.capacity is None:
        return
    room = (
        f"{found.usable / _GIGABYTE:,.1f} GB of {found.device or 'the device'}'s {found.capacity / _GIGABYTE:,.0f}, "
        f"{float(FREE_SHARE):.0%} being left for what is not estimated"
    )
    yield f"It {'fits' if found.fits else 'does not fit'} into {room}."
    if found.largest is not None:
        largest = f"training.{batching}_per_micro_batch={found.largest.items_per_micro_batch}"
        total = f"{found.largest.total / _GIGABYTE:,.2f} GB"
        yield f"The largest micro-batch that fits and divides the step: {largest}, {total}"
    else:
        yield (
            "Not even a micro-batch of one does. Try model.activation_checkpointing=true, deepspeed.zero_stage=1 or 3 "
            "(not with LAMB), shorter packs (data.pack_length), a device with more memory, or more ranks"
        )


@contextmanager
def explained_memory(run: ResolvedRun, world: World) -> Iterator[None]:
    """Explains a lack of memory within the block. Raises: RunError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line, training = str(error).partition("\n")[0], run.config.training
        items, key = training.items_per_micro_batch, f"training.{training.batching}_per_micro_batch"
        smaller = f"fewer than {items} {key} (`evenpack plan` computes how many fit), or " if items > 1 else ""
        raise RunError(
            f"{world.device_name} has too little memory for this step: {first_line}\n"
            f"Take {smaller}model.activation_checkpointing=true; checkpoints stay valid with either"
        ) from error
