"""The estimated memory of a run as text: the same in its plan, and when a GPU runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.data.order.step_shape import Batching, micro_batch_choices
from evenpack.engine.memory.estimate import FREE_SHARE, FittingSettings, RunMemory, run_memory
from evenpack.engine.memory.phases import PhaseMemory
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.models.common.device_peaks import known_device

_GIGABYTE = 1e9

_PARTS = ("parameters", "gradients", "optimizer", "activations", "head", "buffers", "total")

_FIRST_WIDTH = 11
_WIDTH = 12
"""With the mark of the peak a row has 100 characters."""


def memory_text(found: RunMemory, *, batching: Batching) -> str:
    """Returns the memory of each phase in GB (10^9 bytes) or MB, the peak marked, and what fits."""
    notes = (f"Note: {note}" for note in found.notes)
    return "\n".join([*_table(found, batching), *_advice(found, batching), *_host_copies(found), *notes])


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
    if found.fits:
        assert found.largest is not None, "this micro-batch is one that fits"
        yield f"It fits into {room}."
        largest = f"{_override(found.largest, batching)}, {_peak(found.largest)}"
        yield f"The largest micro-batch that fits and divides the step: {largest}"
        return
    yield f"It does not fit into {room}."
    if found.alternatives:
        yield "What fits, each with its largest micro-batch that divides the step:"
        for settings in found.alternatives:
            yield "  " + " ".join([*settings.overrides, _override(settings, batching)]) + f": {_peak(settings)}"
        return
    yield (
        "Not even a micro-batch of one does, with activation checkpointing and ZeRO 1 where possible: take "
        "shorter packs (data.pack_length), a smaller model, a device with more memory, more ranks, or "
        "deepspeed.zero_stage=3, which divides gradients and parameters as well"
    )


def _host_copies(found: RunMemory) -> Iterator[str]:
    copies = found.host_copies
    if copies is None:
        return
    unit, name = (_GIGABYTE, "GB") if copies.first_rank >= _GIGABYTE else (1e6, "MB")
    others = f", {copies.other_rank / unit:,.2f} {name} on each other" if copies.other_rank and found.ranks > 1 else ""
    yield (
        "Host memory for what a background checkpoint copies, estimated:\n  "
        f"{copies.first_rank / unit:,.2f} {name} on rank 0{others} (training.checkpoint_in_background); "
        "pinned for GPUs, up to twice as much"
    )


def _override(settings: FittingSettings, batching: Batching) -> str:
    return f"training.{batching}_per_micro_batch={settings.items_per_micro_batch}"


def _peak(settings: FittingSettings) -> str:
    return f"{settings.total / _GIGABYTE:,.2f} GB"


@contextmanager
def explained_memory(run: ResolvedRun, world: World) -> Iterator[None]:
    """Explains a lack of memory within the block. Raises: RunError with the table of `evenpack plan`."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        is_cuda = world.device.type == "cuda"
        found = run_memory(
            run.config,
            run.item,
            vocabulary_size=run.prepared.vocabulary_size,
            ranks=world.size,
            device=known_device(world.device_name),
            capacity=torch.cuda.get_device_properties(world.device).total_memory if is_cuda else None,
        )
        first_line = str(error).partition("\n")[0]
        training = run.config.training
        choices = micro_batch_choices(training.items_per_step, ranks=world.size)
        smaller = [items for items in choices if items < training.items_per_micro_batch]
        key = f"training.{training.batching}_per_micro_batch"
        place = " (in `stages`, which give it too)" if any(key in one.changes for one in run.run_file.stages) else ""
        remedy = "" if not smaller else f"{key}={smaller[-1]} or less{place}, or "
        raise RunError(
            f"{world.device_name} has too little memory for this step: {first_line}\n"
            f"{memory_text(found, batching=training.batching)}\n"
            f"Take {remedy}model.activation_checkpointing=true; checkpoints stay valid with either"
        ) from error
