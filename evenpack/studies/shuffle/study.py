"""The study `evenpack study shuffle`: orders and how they are read, the loss of runs, and its jumps at borders.

The order in which one epoch trains the sequences of a corpus comes from a plan, or is simulated. The figure draws the
loss of each arm against the step, its jumps at the borders of blocks, and held-out losses by kind of text.

What a report needs of a run is kept beside its result, in shuffle.json, so that it can be reported again without the
run's log and its prepared data.
"""

import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Integer
from pydantic import TypeAdapter
from rich.console import RenderableType

from evenpack.data.batches.read_ahead import ReadAhead
from evenpack.data.manifest import MANIFEST
from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.order.pack_stream import PackStream
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.packing.baselines import next_fit_ends
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sequences.view import StoredView
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.data.tokens.file import bin_path
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.errors import ConfigError
from evenpack.studies.columns import Column, table_of
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, smooth, write_footer, write_title
from evenpack.studies.runs.arms import arm_label, kept_values, of_each_run, seeds_text
from evenpack.studies.runs.jobs import StudyRun
from evenpack.studies.runs.runner import EndedRun, Machine
from evenpack.studies.runs.study import Findings, RunsByArm, TrainedStudy
from evenpack.studies.shuffle.config import ShuffleSection, ShuffleStudyConfig
from evenpack.studies.shuffle.held_out import (
    HeldOutRow,
    caption_of_held_out,
    compare_held_out,
    draw_held_out,
    evaluations_on_text,
    held_out_table,
    read_losses_by_kind,
    require_text,
)
from evenpack.studies.statistics.paired import Spread

_DRAWN_TOGETHER = 1 << 14
_TENTHS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """One epoch of N sequences."""

    positions: Int64[np.ndarray, " N"]
    """Position of each sequence in the corpus, in the order of training."""
    packs: Int64[np.ndarray, " N"]
    """Pack of each sequence, counted from 0; ascending."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures of one order."""

    displacement: float
    """Mean distance between a sequence's positions in the corpus and in training, as a fraction of the corpus; 1/3
    under a uniform permutation."""
    pack_mates: float | None
    """Fraction of the pairs of sequences in a pack from one stretch of the corpus; None: no pack has two."""
    step_mates: float | None
    """Fraction of the pairs in a step, but not in a pack, from one stretch of the corpus."""
    window_distance: float
    """The greatest total variation distance between the sources of a window of the epoch and of the whole epoch."""


def drawn_order(plan: PackStream, source_ids: Integer[np.ndarray, " N"] | None) -> Order:
    """Returns the first epoch of a plan. `source_ids`: positions of the sequences in the corpus; None: in order."""
    ids, sizes = [], []
    for first in range(0, plan.packs, _DRAWN_TOGETHER):
        drawn = plan.draw(np.arange(first, min(first + _DRAWN_TOGETHER, plan.packs)))
        ids.append(drawn.sequence_ids)
        sizes.append(np.diff(drawn.offsets))
    sequence_ids = np.concatenate(ids)
    positions = sequence_ids if source_ids is None else np.asarray(source_ids)[sequence_ids].astype(np.int64)
    return Order(positions=positions, packs=np.repeat(np.arange(plan.packs), np.concatenate(sizes)))


def corpus_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int) -> Order:
    """Returns the order without shuffle: sequences in order, added to a pack until the next one does not fit."""
    positions = np.arange(len(lengths))
    return Order(positions=positions, packs=_packs_in_order(lengths, pack_length))


def buffer_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int, buffer: int, seed: int) -> Order:
    """Returns the order of a rolling buffer: random sequences leave it and are replaced by the next of the corpus."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    held = list(range(min(buffer, count)))
    positions = np.empty(count, dtype=np.int64)
    for place in range(count):
        chosen = int(rng.integers(len(held)))
        positions[place] = held[chosen]
        coming = buffer + place
        if coming < count:
            held[chosen] = coming
        else:
            held[chosen] = held[-1]
            held.pop()
    return Order(positions=positions, packs=_packs_in_order(lengths[positions], pack_length))


def _packs_in_order(lengths: Integer[np.ndarray, " N"], pack_length: int) -> Int64[np.ndarray, " N"]:
    """Returns the pack of each sequence where a pack is closed as soon as the next sequence does not fit."""
    ends = next_fit_ends(lengths, pack_length, max_sequences_per_pack=pack_length, separators=0)
    depths = np.concatenate([np.diff(ends_of_block, prepend=0) for _, ends_of_block in ends])
    return np.repeat(np.arange(len(depths)), depths)


def file_labels(prepared: PreparedData, source: str) -> Int64[np.ndarray, " N"]:
    """Returns the file of each of the N training sequences of a source, by number, in the order of the corpus.

    Tenths of the corpus if it is one file, or no view of documents.
    """
    view = prepared.view(source, "train")
    view = view.source_view if isinstance(view, ShuffledView) else view
    section = prepared.config.sources[source]
    files = [Path(file.path) for file in source_inputs(source, section)]
    if len(files) < 2 or not isinstance(view, DocumentsView):
        return np.arange(view.count) * _TENTHS // view.count
    of_files = [section.model_copy(update={"path": file, "validation_path": None}) for file in files]
    counts = [sum(1 for _ in open_corpus(source, of_file).documents()) for of_file in of_files]
    documents = np.repeat(view.documents, np.diff(view.first_sequences))
    return np.searchsorted(np.cumsum(counts), documents, side="right")


def quality(order: Order, labels: Int64[np.ndarray, " N"], section: ShuffleSection, *, packs_per_step: int) -> Quality:
    """Measures an order; `labels` are the part of the corpus, such as the file, of each sequence by rank."""
    count = len(order.positions)
    stretches = order.positions * section.stretches // count
    pack_equal, pack_pairs = _equal_pairs(order.packs, stretches)
    step_equal, step_pairs = _equal_pairs(order.packs // packs_per_step, stretches)
    step_equal, step_pairs = step_equal - pack_equal, step_pairs - pack_pairs
    return Quality(
        displacement=float(np.abs(order.positions - np.arange(count)).mean() / count),
        pack_mates=pack_equal / pack_pairs if pack_pairs else None,
        step_mates=step_equal / step_pairs if step_pairs else None,
        window_distance=window_distance(labels[order.positions], windows=section.windows),
    )


def window_distance(labels: Int64[np.ndarray, " N"], *, windows: int) -> float:
    """Returns the greatest total variation distance between the labels of a window and all, in training order."""
    kinds = int(labels.max()) + 1
    overall = np.bincount(labels, minlength=kinds) / len(labels)
    return max(
        float(np.abs(np.bincount(window, minlength=kinds) / len(window) - overall).sum() / 2)
        for window in np.array_split(labels, windows)
        if len(window)
    )


def _equal_pairs(groups: Int64[np.ndarray, " N"], values: Int64[np.ndarray, " N"]) -> tuple[int, int]:
    """Returns the pairs within a group that have the same value, and all pairs within a group."""
    together = groups * (int(values.max()) + 1) + values
    _, equal = np.unique(together, return_counts=True)
    _, sizes = np.unique(groups, return_counts=True)
    return _pairs(equal), _pairs(sizes)


def _pairs(sizes: Int64[np.ndarray, " groups"]) -> int:
    return int((sizes * (sizes - 1) // 2).sum())


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


KEPT = "shuffle.json"
_ORDERS = TypeAdapter(list[ArmOrder])


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


def measure_orders(arm: str, config: RunConfig, section: ShuffleSection) -> list[ArmOrder]:
    """Measures the first epoch of a prepared run; of the reference's sequences also two orders that are simulated.

    These are a rolling buffer and no shuffle.
    """
    assert config.training.packs_per_step is not None, "the study has checked its runs"
    per_step, source = config.training.packs_per_step, next(iter(config.data.sources))
    prepared = PreparedData.open(config.prepared_dir, config.data)
    (packed,) = packed_sources(prepared, "train", seed=config.run.seed)
    labels = file_labels(prepared, source)
    source_ids = packed.view.source_ids if isinstance(packed.view, ShuffledView) else None
    drawn = drawn_order(packed.plan, source_ids)
    measured = ArmOrder(
        arm=arm,
        quality=quality(drawn, labels, section, packs_per_step=per_step),
        reading=measure_reading(packed, packs_per_step=per_step, steps=section.steps_read),
        borders=tuple(borders(packed.plan, packs_per_step=per_step, steps=packed.plan.packs // per_step)),
    )
    if arm != section.reference:
        return [measured]
    lengths, pack_length = packed.view.lengths(), prepared.pack_length
    simulated = {
        BUFFER: buffer_order(lengths, pack_length=pack_length, buffer=section.buffer, seed=config.run.seed),
        NO_SHUFFLE: corpus_order(lengths, pack_length=pack_length),
    }
    return [
        measured,
        *(
            ArmOrder(
                arm=name, quality=quality(order, labels, section, packs_per_step=per_step), reading=None, borders=()
            )
            for name, order in simulated.items()
        ),
    ]


def measure_reading(source: PackedSource, *, packs_per_step: int, steps: int) -> Reading:
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
        used += view.read(packs.sequence_ids).tokens.nbytes
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


_READING = (
    Column("order", "arm"),
    Column(
        "read from disk",
        lambda row: f"{row.reading.bytes_from_disk / max(row.reading.bytes_used, 1):.2f} x used",
    ),
    Column("MB/s", "reading.bytes_per_second", ".1f", scale=1e-6),
)
_JUMPS = (
    Column("arm"),
    Column("seeds"),
    Column("jump, nats/target", "jump.mean", "+.4f"),
    Column("deviation", "jump.deviation", ".4f"),
)


def order_tables(orders: Sequence[ArmOrder], section: ShuffleSection) -> list[RenderableType]:
    """Returns tables of the randomness of each order, and of its reading rate; none before a run has finished."""
    if not orders:
        return []
    quality = (
        Column("order", "arm"),
        Column("displacement", "quality.displacement", ".3f"),
        Column("pack-mates", "quality.pack_mates", ".2f", scale=float(section.stretches)),
        Column("step-mates", "quality.step_mates", ".2f", scale=float(section.stretches)),
        Column("sources of a window", "quality.window_distance", ".2%"),
    )
    return [
        table_of(
            orders,
            quality,
            title=(
                "Order of an epoch: mean distance from the position in the corpus (1/3: uniform); neighbours of one "
                f"{section.stretches}th of the corpus in a pack or step, relative to chance; greatest distance of a "
                "window's sources"
            ),
        ),
        table_of(
            [order for order in orders if order.reading is not None],
            _READING,
            title=f"Reading the first {section.steps_read} steps, of a file that is not cached, in this process",
        ),
    ]


def jump_table(
    jumps: Mapping[str, Mapping[int, float]], section: ShuffleSection, *, borders: Sequence[int]
) -> list[RenderableType]:
    """Returns the jumps of the loss at borders of blocks, in each arm at the same steps.

    Nothing without a finished run.
    """
    rows = [
        {"arm": arm, "seeds": len(of_seed), "jump": Spread.of(list(of_seed.values()))}
        for arm, of_seed in jumps.items()
        if of_seed
    ]
    if not rows:
        return []
    title = (
        f"Mean loss of the {section.steps_around_border} steps after a border of blocks minus the mean of as many "
        f"before it, at steps {', '.join(map(str, borders))}"
    )
    return [table_of(rows, _JUMPS, title=title)]


_MOST_UPRIGHT = 7
"""Bars whose names have room side by side."""
_NAME_COLUMNS = 12
"""Columns of an arm's name below its bar."""

LossesOfArms = Mapping[str, Mapping[int, Float64[np.ndarray, " steps"]]]


def plot_shuffle(
    losses: LossesOfArms,
    jumps: Mapping[str, Mapping[int, float]],
    borders: Sequence[int],
    study: ShuffleStudyConfig,
    path: Path,
    *,
    held_out: Sequence[HeldOutRow],
    origin: str,
) -> None:
    """Draws the study; `origin`: data, commits and devices of its runs. Raises: ConfigError without matplotlib."""
    has_jumps, is_compared = any(jumps.values()), any(row.difference is not None for row in held_out)
    ratios = [2.4, *([1.0] if has_jumps else []), *([1.6] if is_compared else [])]
    with figure_as_png(path, width=4.2 * sum(ratios), height=5.0) as figure:
        curves, *others = figure.subplots(1, len(ratios), squeeze=False, gridspec_kw={"width_ratios": ratios})[0]
        for border in borders:
            curves.axvline(border, color=INK, linewidth=0.6, linestyle=":", alpha=0.6)
        colours = {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(losses)}
        for arm, of_seed in losses.items():
            _draw_losses(curves, arm, list(of_seed.values()), colours[arm])
        curves.set_xlabel("step (optimizer updates)")
        curves.set_ylabel("training loss (nats/token)")
        curves.legend(frameon=False)
        write_title(curves, "Loss by order of training")
        if has_jumps:
            _draw_jumps(others[0], jumps, colours, study.shuffle)
        if is_compared:
            draw_held_out(others[-1], held_out, colours, study.shuffle)
        footer = [origin, _caption(losses, has_borders=bool(borders))]
        if is_compared:
            footer.append(caption_of_held_out(study.shuffle))
        write_footer(figure, footer)


def _caption(losses: LossesOfArms, *, has_borders: bool) -> str:
    dotted = " Dotted: borders of the blocks of the corpus. Bars: mean over seeds; dots: single seeds."
    seeds = seeds_text(losses.values()).capitalize()
    return (
        f"{seeds}. Lines: running means of a few steps, mean over seeds; thin: single seeds."
        f"{dotted if has_borders else ''}"
    )


def _draw_losses(axes: Any, arm: str, runs: Sequence[Float64[np.ndarray, " steps"]], colour: str) -> None:
    if not runs:
        return
    steps = min(len(one) for one in runs)
    smoothed = np.stack([smooth(one[:steps]) for one in runs])
    for one in smoothed:
        axes.plot(one, color=colour, linewidth=0.6, alpha=0.35)
    axes.plot(smoothed.mean(axis=0), color=colour, linewidth=1.8, label=arm)


def _draw_jumps(
    axes: Any, jumps: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], section: ShuffleSection
) -> None:
    """Draws a bar for each arm that has steps on both sides of a border, and a point for each seed."""
    measured = {arm: list(of_seed.values()) for arm, of_seed in jumps.items() if of_seed}
    for index, (arm, values) in enumerate(measured.items()):
        axes.bar(index, np.mean(values), color=colours[arm], width=0.6, alpha=0.85)
        axes.plot([index] * len(values), values, "o", color=INK, markersize=3.5)
    axes.axhline(0, color=INK, linewidth=0.7)
    names = [textwrap.fill(arm_label(arm), _NAME_COLUMNS) for arm in measured]
    axes.set_xticks(range(len(measured)), names, rotation=90 if len(names) > _MOST_UPRIGHT else 0)
    axes.set_ylabel(f"mean of {section.steps_around_border} steps after - before (nats/token)")
    write_title(axes, "Change at borders of blocks")


class ShuffleStudy(TrainedStudy[ShuffleStudyConfig]):
    """The arms differ in `data.shuffle`."""

    def __init__(self, study_file: Path, overrides: Sequence[str]) -> None:
        """Loads the study. Raises: ConfigError for settings that make a run invalid, or its order unmeasurable."""
        super().__init__(ShuffleStudyConfig, study_file, overrides)
        for run in self.runs:
            check_run(run.config)
        self.evaluations = evaluations_on_text(self.study, self.compared)

    def reference_of(self, arm: str) -> str:
        return self.study.shuffle.reference

    def compare(self, runs: RunsByArm, ended: Sequence[EndedRun]) -> Findings:
        section = self.study.shuffle
        kept = of_each_run(runs, self._kept)
        orders = [order for of_seed in kept.values() for one in of_seed.values() for order in one.orders]
        orders.sort(key=lambda order: order.reading is None)  # simulated ones last
        borders = _borders_of_corpus(orders, runs)
        losses = of_each_run(kept, lambda one: one.losses)
        jumps = {arm: jumps_at(of_seed, borders, around=section.steps_around_border) for arm, of_seed in losses.items()}
        finished = {run.key for of_seed in runs.values() for run in of_seed.values()}
        of_text = [evaluation for evaluation in self.evaluations if evaluation.starts_from in finished]
        held_out = compare_held_out(read_losses_by_kind(of_text), section)

        def draw(path: Path, origin: str) -> list[Path]:
            plot_shuffle(losses, jumps, borders, self.study, path, held_out=held_out, origin=origin)
            return [path]

        return Findings(
            value={
                "orders": orders,
                "borders": borders,
                "jumps": jumps,
                "held_out": held_out,
                "losses": of_each_run(losses, lambda values: values.round(6).tolist()),
            },
            shown=[
                *order_tables(orders, section),
                *jump_table(jumps, section, borders=borders),
                *held_out_table(held_out, section),
            ],
            draw=draw,
        )

    def _train(self, machine: Machine, devices_per_run: int | None) -> tuple[EndedRun, ...]:
        require_text(self.study.shuffle)
        return super()._train(machine, devices_per_run)

    def _kept(self, run: StudyRun) -> "Kept":
        """Returns what the report needs of a finished run, and keeps it; orders are measured for the first seed."""
        is_first = run.seed == self.study.phases[run.phase].seeds[0]
        return keep(run, measure=lambda: measure_orders(run.arm, run.config, self.study.shuffle) if is_first else [])


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a report needs of one run."""

    losses: Float64[np.ndarray, " steps"]
    """See `read_losses`."""
    orders: list[ArmOrder]


def keep(run: StudyRun, *, measure: Callable[[], list[ArmOrder]]) -> Kept:
    """Returns a finished run's losses and orders, and keeps them in shuffle.json; without its data it reads that file.

    Raises: DataError if neither the log with the prepared data nor shuffle.json is there, or if this is damaged.
    """

    def made() -> dict[str, Any]:
        losses = [None if np.isnan(loss) else round(loss, 6) for loss in read_losses(run.output_dir).tolist()]
        return {"losses": losses, "orders": _ORDERS.dump_python(measure(), mode="json")}

    sources = [run.output_dir / METRICS, run.config.prepared_dir / MANIFEST]
    return kept_values(run.output_dir / KEPT, sources, made, _kept_of)


def _kept_of(values: dict[str, Any]) -> Kept:
    losses = np.array(values["losses"], dtype=np.float64)  # None becomes NaN
    return Kept(losses=losses, orders=_ORDERS.validate_python(values["orders"]))


def _borders_of_corpus(orders: Sequence[ArmOrder], runs: RunsByArm) -> tuple[int, ...]:
    """Returns the starts of blocks of the corpus in its own order, from the first arm of the kind `blocks`.

    Else none.
    """
    for one in orders:
        if one.borders and next(iter(runs[one.arm].values())).config.data.shuffle.kind == "blocks":
            return one.borders
    return ()
