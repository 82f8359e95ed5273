"""One arm of a shuffle study: its order, its reading rate, and the loss at the borders of its blocks."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evenpack.data.batches.read_ahead import ReadAhead
from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.order.pack_stream import PackStream
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sequences.view import StoredView
from evenpack.data.tokens.file import bin_path
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.errors import ConfigError
from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.orders import Quality, buffer_order, corpus_order, drawn_order, file_labels, quality

NO_SHUFFLE = "no shuffle"
BUFFER = "rolling buffer"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The first steps of an epoch, read once."""

    bytes_used: int
    """Bytes of the sequences."""
    bytes_from_disk: int
    """Bytes that the process read from disk."""
    bytes_per_second: float
    """Rate of the bytes used."""


@dataclass(frozen=True, kw_only=True)
class ArmOrder:
    """The order of an arm."""

    arm: str
    quality: Quality
    reading: Reading | None
    """Reading rate; None: the order is simulated, and no file is in this order."""
    borders: tuple[int, ...]
    """Steps that begin a block of the first epoch, except for the first one."""


def check_run(config: RunConfig) -> None:
    """Checks a run. Raises: ConfigError unless it has one source and steps of packs."""
    if len(config.data.sources) != 1:
        raise ConfigError(
            f"a shuffle study measures the order of one source, found {', '.join(config.data.sources)}: give one "
            "source with several files"
        )
    if config.training.skip_steps:
        raise ConfigError("a shuffle study compares the loss of every step: leave training.skip_steps out")
    if config.training.packs_per_step is None:
        raise ConfigError("a shuffle study needs training.packs_per_step: it measures steps of packs")


def measure_order(arm: str, config: RunConfig, section: ShuffleSection) -> ArmOrder:
    """Measures the first epoch of a prepared run."""
    prepared, source = _opened(config)
    (packed,) = packed_sources(prepared, "train", seed=config.run.seed)
    labels = file_labels(config.data, source, prepared)
    source_ids = packed.view.source_ids if isinstance(packed.view, ShuffledView) else None
    order = drawn_order(packed.plan, source_ids)
    per_step = _packs_per_step(config)
    return ArmOrder(
        arm=arm,
        quality=quality(order, labels.of_sequence, section, packs_per_step=per_step),
        reading=read_steps(packed, packs_per_step=per_step, steps=section.steps_read),
        borders=tuple(borders(packed.plan, packs_per_step=per_step, steps=packed.plan.packs // per_step)),
    )


def measure_simulated(config: RunConfig, section: ShuffleSection) -> tuple[ArmOrder, ...]:
    """Measures a rolling buffer and no shuffle, for the sequences of a run that is not shuffled on disk."""
    prepared, source = _opened(config)
    view = prepared.view(source, "train")
    labels, lengths = file_labels(config.data, source, prepared), view.lengths()
    orders = {
        BUFFER: buffer_order(lengths, pack_length=prepared.pack_length, buffer=section.buffer, seed=config.run.seed),
        NO_SHUFFLE: corpus_order(lengths, pack_length=prepared.pack_length),
    }
    per_step = _packs_per_step(config)
    return tuple(
        ArmOrder(
            arm=name,
            quality=quality(order, labels.of_sequence, section, packs_per_step=per_step),
            reading=None,
            borders=(),
        )
        for name, order in orders.items()
    )


def read_steps(source: PackedSource, *, packs_per_step: int, steps: int) -> Reading:
    """Reads the sequences of the first `steps` steps in their order, with the read-ahead of training."""
    view = source.view
    assert isinstance(view, StoredView | ShuffledView), "views of token files are the only ones there are"
    view.token_file.release_pages()  # mapped pages stay cached
    _forget(bin_path(view.token_file.prefix))
    ahead = ReadAhead([source])
    used = 0
    before, began = _read_from_disk(), time.perf_counter()
    for step in range(min(steps, source.plan.packs // packs_per_step)):
        positions = np.arange(step * packs_per_step, (step + 1) * packs_per_step)
        packs = select_packs([source], np.zeros(len(positions), dtype=np.int64), positions)
        ahead.follow(packs)
        used += view.gather(packs.sequence_ids).nbytes
    seconds = time.perf_counter() - began
    return Reading(
        bytes_used=used, bytes_from_disk=_read_from_disk() - before, bytes_per_second=used / max(seconds, 1e-9)
    )


def borders(plan: PackStream, *, packs_per_step: int, steps: int) -> list[int]:
    """Returns the steps of the first epoch, counted from 0, that are the first to hold packs of a further block."""
    if not isinstance(plan, BlockedPlan):
        return []
    ends: list[int] = []
    position = 0
    while position < plan.packs:
        first, _ = plan.sequences_ahead(position, 1)[0]
        block = int(np.searchsorted(plan.blocks.first_sequences, first, side="right")) - 1
        position += int(plan.blocks.packs[block])
        ends.append(-(-position // packs_per_step))
    return [step for step in ends[:-1] if step < steps]


def jump(losses: Float64[np.ndarray, " steps"], at: Sequence[int], *, around: int) -> float | None:
    """Returns the mean loss of the steps after a border minus the mean of those before it, averaged over borders.

    Steps without a loss (NaN) count in no mean. Borders with fewer than `around` steps on a side, or none with a loss
    there, are left out; None: all of them are.
    """
    sides = [(losses[step - around : step], losses[step : step + around]) for step in at if step >= around]
    found = [
        float(np.nanmean(after) - np.nanmean(before))
        for before, after in sides
        if len(after) == around and np.isfinite(before).any() and np.isfinite(after).any()
    ]
    return float(np.mean(found)) if found else None


def read_losses(output_dir: Path) -> Float64[np.ndarray, " steps"]:
    """Returns the training loss of each step of a finished run; NaN for a step left out by `on_nan: skip`."""
    return np.array([record["loss"] for record in read_metrics(output_dir / METRICS)], dtype=np.float64)


def jumps_at(
    losses: Mapping[int, Float64[np.ndarray, " steps"]], at: tuple[int, ...], *, around: int
) -> dict[int, float]:
    """Returns, by seed, the mean jump of the loss at the given steps; seeds without one are left out."""
    found = {seed: jump(values, at, around=around) for seed, values in losses.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _opened(config: RunConfig) -> tuple[PreparedData, str]:
    return PreparedData.open(config.prepared_dir, config.data), next(iter(config.data.sources))


def _packs_per_step(config: RunConfig) -> int:
    assert config.training.packs_per_step is not None, "the study has checked its runs"
    return config.training.packs_per_step


def _forget(path: Path) -> None:
    """Asks the system to remove the file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_from_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(lines["read_bytes"])
