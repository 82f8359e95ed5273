"""One arm of a shuffle study: its order, its reading rate, and the loss at the borders of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.data.packed_sources import packed_sources
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.errors import ConfigError
from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.jumps import borders, jump
from evenpack.studies.shuffle.labels import file_labels
from evenpack.studies.shuffle.orders import buffer_order, corpus_order, drawn_order
from evenpack.studies.shuffle.quality import Quality, quality
from evenpack.studies.shuffle.reading import Reading, read_steps

NO_SHUFFLE = "no shuffle"
BUFFER = "rolling buffer"


@dataclass(frozen=True, kw_only=True)
class ArmOrder:
    """The order of an arm."""

    arm: str
    quality: Quality
    reading: Reading | None
    """Reading rate; None: the order is simulated, and no file is in this order."""
    borders: tuple[int, ...]
    """Steps that begin a block of the first epoch, except for the first one."""


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


def read_losses(config: RunConfig) -> Float64[np.ndarray, " steps"]:
    """Returns the training loss of each step of a finished run; NaN for a step left out by `on_nan: skip`."""
    return np.array([record["loss"] for record in read_metrics(config.run.output_dir / METRICS)], dtype=np.float64)


def jumps_at(
    losses: Mapping[int, Float64[np.ndarray, " steps"]], at: tuple[int, ...], *, around: int
) -> dict[int, float]:
    """Returns, by seed, the mean jump of the loss at the given steps; seeds without one are left out."""
    found = {seed: jump(values, at, around=around) for seed, values in losses.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def check_run(config: RunConfig) -> None:
    """Checks a run. Raises: ConfigError if its order is not that of one source in steps of packs."""
    if len(config.data.sources) != 1:
        raise ConfigError(
            f"a shuffle study measures the order of one source, found {', '.join(config.data.sources)}: give one "
            "source with several files"
        )
    if config.training.skip_steps:
        raise ConfigError("a shuffle study compares the loss of every step: leave training.skip_steps out")
    if config.training.packs_per_step is None:
        raise ConfigError("a shuffle study needs training.packs_per_step: it measures steps of packs")


def _opened(config: RunConfig) -> tuple[PreparedData, str]:
    return PreparedData.open(config.prepared_dir, config.data), next(iter(config.data.sources))


def _packs_per_step(config: RunConfig) -> int:
    assert config.training.packs_per_step is not None, "the study has checked its runs"
    return config.training.packs_per_step
