"""Clusters replayed on one device: each micro-batch that one of N ranks would get is computed, one after another.

The steps are those that training would plan on N ranks, of as many sequences or packs on each rank whatever N is. Every
rank's micro-batches are timed, forward and backward; a step takes as long as its slowest rank (at ZeRO 2 and 3 the
slowest one of each micro-batch), and the update as it was measured. What a replay lacks is the network, and whatever
else makes equal devices unequal.

Parts that are the same micro-batches on several numbers of ranks, as all of them are where items are assigned by
arrival, are timed once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy.optimize import lsq_linear

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_plan import StepPlan
from evenpack.data.packing import LengthHistogram
from evenpack.data.sequences import length_chunks
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import FREE_SHARE, micro_batch_size, training_memory
from evenpack.engine.resolving.cost_model import MeasuredOn
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.progress import Progress
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    PACKS_BY_ARRIVAL,
    UNPADDED_ARRIVAL,
    UNPADDED_BALANCED,
    ClusterOptions,
    Scheme,
    slowest_seconds,
)
from evenpack.studies.imbalance.simulation import SchemeRow, StepTimes, summarise
from evenpack.studies.provenance import made_by
from evenpack.studies.throughput.contenders import changed, run_to_measure, sequences_per_item, with_steps
from evenpack.studies.throughput.measure import MeasuredStep, StepTimer, measured_on

REPLAYED: tuple[Scheme, ...] = (BALANCED_PACKS, PACKS_BY_ARRIVAL, UNPADDED_BALANCED, UNPADDED_ARRIVAL, BASELINE)
_SEED = 0
_WARMUP = 2
"""Parts of each scheme that are computed before any is timed."""

Part = tuple[str, tuple[tuple[int, ...], ...]]
"""One rank's part of a step, by which it is recognised: its layout, and the items of each of its micro-batches."""
Seconds = Float64[np.ndarray, "steps ranks micro_batches"]


class VirtualRanks:
    """The parts of a step that ranks would get, planned in one process; every rank has the work of the run's step.

    Step and rank say which items a part has; for one layout and one seed, item i of the run is the same one on any
    number of ranks.
    """

    def __init__(self, run: ResolvedRun, world: World) -> None:
        self._run = run
        self._world = world
        self._datasets: dict[int, MicroBatchDataset] = {}
        self._plans: dict[tuple[int, int], StepPlan] = {}

    def share(self, ranks: int, step: int, rank: int) -> list[PackedBatch]:
        """Returns the micro-batches of one rank."""
        dataset, plan = self.dataset(ranks), self._plan(ranks, step)
        return [dataset.collator.collate(each, plan.counts) for each in self._packs(ranks, step, rank)]

    def items(self, ranks: int, step: int, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the items of each micro-batch of one rank, by their numbers in the run's order, ascending."""
        settings, plan = self.dataset(ranks).settings, self._plan(ranks, step)
        first = step * settings.shape.items_per_step
        numbers = range(rank * settings.micro_batches, (rank + 1) * settings.micro_batches)
        return tuple(tuple(sorted((first + plan.assignment.items_of(number)).tolist())) for number in numbers)

    def lengths(self, ranks: int, step: int, rank: int) -> Int64[np.ndarray, " sequences"]:
        """Returns the lengths of all sequences of one rank."""
        return np.concatenate([packs.lengths for packs in self._packs(ranks, step, rank)])

    def _packs(self, ranks: int, step: int, rank: int) -> list[PackSelection]:
        """Returns the content of the micro-batches of one rank."""
        plan = self._plan(ranks, step)
        return [plan.micro_batch(rank, index) for index in range(self.dataset(ranks).settings.micro_batches)]

    def dataset(self, ranks: int) -> MicroBatchDataset:
        """Returns the data of so many ranks."""
        if ranks not in self._datasets:
            shape = self._run.shape
            of_all = replace(shape, items_per_step=ranks * shape.items_per_step)
            settings = self._run.pipeline_settings(self._world)
            settings = replace(settings, shape=of_all, ranks=ranks, stages=())
            self._datasets[ranks] = MicroBatchDataset(self._run.prepared, settings)
        return self._datasets[ranks]

    def _plan(self, ranks: int, step: int) -> StepPlan:
        """Returns the plan of a step, which all ranks have in common."""
        if (ranks, step) not in self._plans:
            self._plans[ranks, step] = self.dataset(ranks).planner.plan(step)
        return self._plans[ranks, step]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What was replayed, and on what."""

    measured_on: MeasuredOn
    batch: int
    """Sequences per micro-batch."""
    packs: int
    """Packs per micro-batch."""
    accumulation: int
    zero_stage: int
    update_seconds: float
    """Median of the update, with norm and clipping, on this device alone: of all parameters, as at ZeRO 0."""
    timed_parts: int
    """Parts of steps that were timed; parts that several clusters share count once."""
    rows: tuple[SchemeRow, ...]

    def described(self) -> str:
        """Returns device, model and commit, for figures and tables."""
        on = self.measured_on
        return (
            f"{on.model} of {on.layers} layers, {on.precision}, one {on.device}; torch {on.torch}, "
            f"{made_by(on.evenpack, [on.commit])}"
        )

    def of(self, scheme: Scheme) -> tuple[SchemeRow, ...]:
        """Returns a row for each number of devices, ascending."""
        return tuple(row for row in self.rows if row.is_of(scheme))

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """What was replayed."""
        return tuple(scheme for scheme in REPLAYED if self.of(scheme))


def replay(
    config: RunConfig,
    world: World,
    *,
    devices: Sequence[int],
    steps: int,
    options: ClusterOptions,
    packs: int,
    progress: Progress,
) -> Replay:
    """Replays clusters of these numbers of devices, and of one, on this process's device.

    Args:
        steps: of the largest cluster, 2 or more; smaller ones get as many more as take the same micro-batches.
        options: what a device computes in a step.
        packs: packs per micro-batch.
        progress: shows the parts that are measured, and of which scheme the last one was.

    Raises: ConfigError if there are several ranks, or a micro-batch does not fit the device;
        NotPreparedError, DataError.
    """
    if world.size > 1:
        raise ConfigError(f"--replay runs all ranks on one device, but {world.size} processes were started: start one")
    measured = run_to_measure(config)
    runs = {scheme: _run_of(measured, scheme, options, packs) for scheme in REPLAYED}
    for scheme, run in runs.items():
        _require_memory(run, scheme, world)
    counts = sorted({1, *devices})
    clusters = {one: range(steps * counts[-1] // one) for one in counts}
    with _one_core_per_device(world):
        alone = resolve(changed(runs[BASELINE].config, deepspeed={"zero_stage": 0}), measured.prepared)
        timer = StepTimer(alone, world, clock="wall" if world.device.type == "cuda" else "cpu")
        ranks = {scheme: VirtualRanks(run, world) for scheme, run in runs.items()}
        timed = _time_parts(timer, ranks, clusters, progress)
        origin = measured_on(runs[BASELINE], world, layouts=tuple(scheme.label for scheme in REPLAYED))
    update = float(np.median([one.update_seconds + one.all_reduce_seconds for one in timed.values()]))
    seconds = {scheme: _seconds(scheme, virtual, clusters, timed) for scheme, virtual in ranks.items()}
    times: dict[tuple[Scheme, int], StepTimes] = {}
    for scheme, virtual in ranks.items():
        times |= _step_times(scheme, virtual, clusters, seconds[scheme], update=update, waits_often=options.waits_often)
    return Replay(
        measured_on=origin,
        batch=options.batch,
        packs=packs,
        accumulation=options.accumulation,
        zero_stage=options.zero_stage,
        update_seconds=update,
        timed_parts=len(timed),
        rows=tuple(row for scheme in REPLAYED for row in summarise(scheme, times)),
    )


def _run_of(run: ResolvedRun, scheme: Scheme, options: ClusterOptions, packs: int) -> ResolvedRun:
    """Returns the run with the work of one device as its step."""
    each = packs if scheme.batching == "packs" else options.batch
    per_step = options.accumulation * each
    config = with_steps(run.config, scheme.batching, scheme.layout, scheme.policy, each=each, per_step=per_step)
    return resolve(changed(config, deepspeed={"zero_stage": options.zero_stage}), run.prepared)


def _require_memory(run: ResolvedRun, scheme: Scheme, world: World) -> None:
    """Checks that a micro-batch fits a GPU, by the estimate of its memory. Raises: ConfigError."""
    if world.device.type != "cuda":
        return
    size = micro_batch_size(run.config, run.item)
    memory = training_memory(run.config, size, vocabulary_size=run.prepared.vocabulary_size, ranks=1)
    room = float(torch.cuda.get_device_properties(world.device).total_memory * (1 - FREE_SHARE))
    if memory.peak.total > room:
        raise ConfigError(
            f"--replay: a micro-batch of {run.shape.items_per_micro_batch} {scheme.batching} ({scheme.label}) needs "
            f"about {memory.peak.total / 1e9:.0f} GB of this device, and {room / 1e9:.0f} GB are to be used: lower "
            "--batch and --packs, or set training.activation_checkpointing=true"
        )


@contextmanager
def _one_core_per_device(world: World) -> Iterator[None]:
    """A device is simulated by one CPU core; only the process's own seconds count, so that other load is no wait."""
    threads = torch.get_num_threads()
    if world.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _part(scheme: Scheme, virtual: VirtualRanks, ranks: int, step: int, rank: int) -> Part:
    return scheme.layout, virtual.items(ranks, step, rank)


def _time_parts(
    timer: StepTimer,
    ranks: dict[Scheme, VirtualRanks],
    clusters: dict[int, range],
    progress: Progress,
) -> dict[Part, MeasuredStep]:
    """Returns each part, measured as a step of one device.

    They are timed in random order: a machine's load varies, and a slow period must not affect the ranks of one step, or
    one scheme, more than any others, as on separate devices.
    """
    turns: dict[Part, tuple[Scheme, int, int, int]] = {}
    for scheme, virtual in ranks.items():
        for number, steps in clusters.items():
            for step in steps:
                for rank in range(number):
                    turns.setdefault(_part(scheme, virtual, number, step, rank), (scheme, number, step, rank))
    for virtual in ranks.values():
        for step in range(_WARMUP):
            timer.time_step(virtual.share(1, clusters[1].stop + step, 0))
    parts = list(turns)
    found, shown = {}, progress.begin("step", counted=True)
    for done, chosen in enumerate(np.random.default_rng(_SEED).permutation(len(parts)), start=1):
        scheme, number, step, rank = turns[parts[chosen]]
        found[parts[chosen]] = timer.time_step(ranks[scheme].share(number, step, rank))
        shown.update(done, len(parts), facts=[scheme.label])
    return found


def _seconds(
    scheme: Scheme, virtual: VirtualRanks, clusters: dict[int, range], timed: dict[Part, MeasuredStep]
) -> dict[int, Seconds]:
    """Returns the seconds of every micro-batch, for each number of devices."""
    found = {}
    for number, steps in clusters.items():
        parts = [[_part(scheme, virtual, number, step, rank) for rank in range(number)] for step in steps]
        found[number] = np.array([[timed[part].micro_batches.seconds for part in of_step] for of_step in parts])
    return found


def _step_times(
    scheme: Scheme,
    virtual: VirtualRanks,
    clusters: dict[int, range],
    seconds: dict[int, Seconds],
    *,
    update: float,
    waits_often: bool,
) -> dict[tuple[Scheme, int], StepTimes]:
    """Returns the steps of one scheme for each number of devices.

    The work that a step's items have by chance is corrected for by a ratio of means: of the seconds that fit the mean
    item's work to those that fit the steps'. So a few steps of a noisy device have no mean below zero; single steps
    are corrected to first order, which their spread needs.
    """
    dataset = virtual.dataset(1)
    items, sequences = dataset.settings.shape.items_per_step, sequences_per_item(dataset)
    work = {}
    for number, steps in clusters.items():
        lengths = [[virtual.lengths(number, step, rank) for rank in range(number)] for step in steps]
        work[number] = np.array([[_work(each) for each in of_step] for of_step in lengths]) / items
    fitted = _fitted_seconds(
        np.concatenate([each.reshape(-1, 2) for each in work.values()]),
        np.concatenate([each.sum(axis=2).ravel() for each in seconds.values()]),
    )
    expected = fitted(_mean_work(virtual))
    found = {}
    for number, of_ranks in seconds.items():
        waited = slowest_seconds(of_ranks, waits_often=waits_often)
        of_work = fitted(work[number].mean(axis=1))
        from_mean = of_work - of_work.mean()
        found[scheme, number] = StepTimes(
            step=waited + update,
            mean=of_ranks.sum(axis=2).mean(axis=1) + update,
            as_expected=(waited - waited.mean() / of_work.mean() * from_mean) * expected / of_work.mean() + update,
            sequences=number * items * sequences,
        )
    return found


def _fitted_seconds(
    work: Float64[np.ndarray, "parts 2"], seconds: Float64[np.ndarray, " parts"]
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns positive seconds by tokens and squared lengths: least squares, where more work never takes less time."""
    terms = np.column_stack([np.ones(len(work)), work])
    scale = terms.max(axis=0)
    factors = lsq_linear(terms / scale, seconds, bounds=(0, np.inf), method="bvls").x / scale
    return lambda work: factors[0] + work @ factors[1:]


def _work(lengths: np.ndarray) -> tuple[float, float]:
    return float(lengths.sum()), float((lengths**2).sum())


def _mean_work(virtual: VirtualRanks) -> Float64[np.ndarray, "2"]:
    """Returns tokens and squared lengths of the mean item over an epoch, the sources weighted as the run draws them."""
    dataset = virtual.dataset(1)
    total = np.zeros(2)
    for weight, source in zip(dataset.data.weights, dataset.planner.sources, strict=True):
        view = source.view
        histogram = LengthHistogram.from_chunks(length_chunks(view), longest=view.max_sequence_length)
        lengths = np.arange(1, len(histogram.counts) + 1)
        total += weight * np.array([histogram.counts @ lengths, histogram.counts @ lengths**2]) / source.plan.packs
    return total / sum(dataset.data.weights)
